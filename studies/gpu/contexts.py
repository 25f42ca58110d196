"""Print the CUDA runtime calls of the device methods `facts` and `select`: `python -m studies.gpu.contexts`.

No GPU is needed: a library with stubs of the runtime's functions prints their names. The program needs a CUDA build of
torch and the compiler cc. It first imports the module from which workers are forked; this import must print no call.
The calls are also printed for a busy device, on which `cudaSetDevice` fails, as on a GPU in compute mode
EXCLUSIVE_PROCESS that another process uses.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

STUB = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define CALLED fprintf(stderr, "  %s\n", __func__)
int cudaGetDeviceCount(int *number) { CALLED; *number = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaGetDriverEntryPointByVersion() { return 0; }
int cudaGetDeviceProperties(char *properties, int device) {
    CALLED;
    memset(properties, 0, 900);
    strcpy(properties, "Stub");
    *(size_t *)(properties + 288) = 1ull << 34;  // bytes of memory
    *(int *)(properties + 360) = 9;  // compute capability
    return 0;
}
int cudaSetDevice(int device) { CALLED; return getenv("STUB_BUSY") ? 46 : 0; }
int cudaGetLastError() { return 0; }
const char *cudaGetErrorString(int error) { return "CUDA-capable device(s) is/are busy or unavailable"; }
const char *cudaGetErrorName(int error) { return "cudaErrorDevicesUnavailable"; }
int cuDevicePrimaryCtxGetState(int device, int *flags, int *active) { *flags = *active = 0; return 0; }
"""
CODE = """
from attnbench.processes.worker.__main__ import device  # the template of all workers: its import must call nothing
here = device("cuda")
print("facts():", flush=True)
print(" ", here.facts().accelerator, flush=True)
print("select():", flush=True)
here.select()
print(" ", here.missing() or "selected", flush=True)
"""


def main() -> int:
    """Print the calls on a free and on a busy device; return 3 if torch was built without CUDA, else 0."""
    if torch.version.cuda is None:
        print("this torch was built without CUDA")  # noqa: T201 - the answer
        return 3
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"  # torch opens the driver by this name, too
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", str(library), "-xc", "-"]
        subprocess.run(command, input=STUB, text=True, check=True)  # noqa: S603 - our own
        for busy in ({}, {"STUB_BUSY": "1"}):
            print("A busy device" if busy else "A free device", flush=True)  # noqa: T201
            environment = os.environ | busy | {"LD_PRELOAD": str(library), "PYTHONWARNINGS": "ignore"}
            subprocess.run([sys.executable, "-c", CODE], env=environment, stderr=subprocess.STDOUT, check=True)  # noqa: S603
    return 0


if __name__ == "__main__":
    sys.exit(main())
