"""On a processor with AMX, SDPA in bfloat16 fails if PyTorch is limited to an older instruction set: needs torch alone.

`python limited_bfloat16.py` tries each of PyTorch's instruction sets in a process of its own. It exits with 1 if one of
them raises an error but the processor's own does not.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

CHILD = """
import torch
operands = torch.randn(3, 1, 8, 256, 64, dtype=torch.bfloat16).unbind()
try:
    torch.nn.functional.scaled_dot_product_attention(*operands)
    print("computes")
except RuntimeError as error:
    print("raises", str(error).splitlines()[0])
print(torch.__version__)
"""
found = {}
for capability in ("", "avx2", "default"):
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    environment |= {"ATEN_CPU_CAPABILITY": capability} if capability else {}
    command = [sys.executable, "-c", CHILD]
    found[capability] = subprocess.check_output(command, text=True, env=environment).splitlines()  # noqa: S603 - our own program
processor = Path("/proc/cpuinfo").read_text()
cpu = processor.partition("model name\t: ")[2].partition("\n")[0] or platform.processor()
print(f"torch {found[''][-1]}, {'AMX' if 'amx_tile' in processor else 'no AMX'} on {cpu}")
for capability, (outcome, _) in found.items():
    print(f"{f'ATEN_CPU_CAPABILITY={capability}' if capability else 'as it is'}: {outcome}")
fails = [outcome.startswith("raises") for outcome, _ in found.values()]
sys.exit(int(any(fails) and not fails[0]))
