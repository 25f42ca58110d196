"""`python -m studies.gpu.contexts`: which calls of CUDA's runtime make a context, without a GPU.

A stand-in for the runtime prints the name of each call and does nothing; a device that is busy refuses `cudaSetDevice`,
as a GPU in the compute mode EXCLUSIVE_PROCESS does for a second process. Needs a CUDA build of torch, a C compiler, nm.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so")
BUSY = "CUDA-capable device(s) is/are busy or unavailable"
ANSWERS = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { CALLED; *n = 1; return 0; }",
    "cudaGetDevice": "int cudaGetDevice(int *n) { *n = 0; return 0; }",
    "cudaGetDeviceProperties": """int cudaGetDeviceProperties(char *p, int device) {
    CALLED;
    memset(p, 0, 900);
    strcpy(p, "Stub");
    *(size_t *)(p + 288) = 1ull << 34;  // bytes of memory
    *(int *)(p + 360) = 9;  // compute capability
    return 0; }""",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *n) { *n = 13000; return 0; }",
    "cudaGetErrorString": f'const char *cudaGetErrorString(int e) {{ return "{BUSY}"; }}',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "cudaErrorDevicesUnavailable"; }',
    "cudaGetLastError": "int cudaGetLastError() { return 0; }",
    "cudaPeekAtLastError": "int cudaPeekAtLastError() { return 0; }",
    "cuDevicePrimaryCtxGetState": "int cuDevicePrimaryCtxGetState(int d, int *f, int *a) { *f = *a = 0; return 0; }",
}
"""Functions of the runtime, and one of the driver, with answers; others answer 0, or 46 where the device is busy."""
HEAD = """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define CALLED fprintf(stderr, "  %s\\n", __func__)
"""
CODE = """
from attnbench.devices import device
here = device("cuda")
print("facts():", flush=True)
print(" ", here.facts().accelerator, flush=True)
print("select():", flush=True)
here.select()
print(" ", here.missing() or "selected", flush=True)
"""


def main() -> int:
    """Print the calls of `facts` and of `select`, on a free and on a busy device; 3 without a CUDA build of torch."""
    if torch.version.cuda is None:
        print("this torch was built without CUDA")  # noqa: T201 - the answer
        return 3
    libraries = [str(Path(torch.__file__).parent / "lib" / name) for name in LIBRARIES]
    symbols = subprocess.run(["nm", "-D", *libraries], capture_output=True, text=True, check=True).stdout  # noqa: S603, S607
    names = sorted({*re.findall(r" U (cuda\w+)", symbols), *ANSWERS})
    plain = 'int {0}() {{ CALLED; return getenv("STUB_BUSY") ? 46 : 0; }}'
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "stub.c", Path(folder) / "libcuda.so.1"
        source.write_text("\n".join([HEAD, *(ANSWERS.get(name, plain.format(name)) for name in names), ""]))
        flags = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]  # torch opens the driver by this name
        subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)  # noqa: S603, S607
        for busy in ({}, {"STUB_BUSY": "1"}):
            print("A busy device" if busy else "A free device", flush=True)  # noqa: T201
            environment = os.environ | busy | {"LD_PRELOAD": str(library), "PYTHONWARNINGS": "ignore"}
            subprocess.run([sys.executable, "-c", CODE], env=environment, stderr=subprocess.STDOUT, check=True)  # noqa: S603
    return 0


if __name__ == "__main__":
    sys.exit(main())
