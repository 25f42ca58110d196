"""`torch.set_num_threads(torch.get_num_threads())` changes no number and yet may slow SDPA down: needs torch alone.

    python set_num_threads.py [LENGTH ...]        # 2 minutes for 128, 256, 512 and 1024

Processes with and without that call run in turn, 12 of each. A line for each length has the ratio of their medians with
its 95 % interval over pairs of processes. The exit code is 1 if the interval of a length lies above 1.02.
"""

import math
import platform
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

NUM_PAIRS, T_95 = 12, 2.201  # Student's t for 11 degrees of freedom
LENGTHS = sys.argv[1:] or ["128", "256", "512", "1024"]
CHILD = """
import statistics, sys, time, torch
if sys.argv[1] == "called":
    torch.set_num_threads(torch.get_num_threads())
for length in map(int, sys.argv[2:]):
    operands, times = torch.randn(3, 1, 8, length, 64).unbind(), []
    until = time.perf_counter() + 0.6
    while time.perf_counter() < until:
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(*operands)
        times.append(time.perf_counter() - start)
    print(statistics.median(times[len(times) // 4 :]))
print(torch.__version__, torch.backends.mkl.is_available(), torch.get_num_threads())
"""
found: dict[str, list[list[str]]] = {"called": [], "untouched": []}
for pair in range(NUM_PAIRS):
    for way in sorted(found, reverse=pair % 2 == 1):  # pairs alternate which one runs first
        command = [sys.executable, "-c", CHILD, way, *LENGTHS]
        found[way].append(subprocess.check_output(command, text=True).splitlines())  # noqa: S603 - our own program
cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0] or platform.processor()
print("torch {}, MKL {}, {} threads".format(*found["called"][0][-1].split()), "on", cpu)
lows = []
for place, length in enumerate(LENGTHS):
    logs = [math.log(float(a[place]) / float(b[place])) for a, b in zip(*found.values(), strict=True)]
    low, high = (math.exp(mean(logs) + sign * T_95 * stdev(logs) / NUM_PAIRS**0.5) for sign in (-1, 1))
    lows.append(low)
    untouched = 1e6 * mean(float(each[place]) for each in found["untouched"])
    print(f"T={length}: {untouched:.0f} us, with the call {math.exp(mean(logs)):.3f} of that ({low:.3f} to {high:.3f})")
sys.exit(int(max(lows) > 1.02))
