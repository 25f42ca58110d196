"""Time functions, one plain call at a time: python plain_loop.py mine.py:attention torch:sdpa --seq 512."""

import argparse
import inspect
import random
import runpy
import statistics
import time

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("names", nargs="+", metavar="file.py:function")
for option, default in {"batch": 1, "heads": 8, "seq": 256, "dim": 64}.items():
    parser.add_argument(f"--{option}", type=int, default=default)
parser.add_argument("--seconds", type=float, default=3.0, help="timed seconds for each function")
parser.add_argument("--causal", action="store_true", help="pass is_causal=True, or a lower-triangular mask")
args = parser.parse_args()
calls = []
for path, _, name in (text.rpartition(":") for text in args.names):
    function = torch.nn.functional.scaled_dot_product_attention if path == "torch" else runpy.run_path(path)[name]
    if path == "torch" or "is_causal" in inspect.signature(function).parameters:
        calls.append((function, {"is_causal": args.causal}))
    else:
        calls.append((function, {"mask": torch.ones(args.seq, args.seq).tril().bool()} if args.causal else {}))
with torch.inference_mode():
    query, key, value = (torch.randn(args.batch, args.heads, args.seq, args.dim) for _ in range(3))
    for seconds in (0.3, args.seconds):  # the first pass only warms up: the second starts its lists afresh
        times: list[list[float]] = [[] for _ in calls]
        end = time.perf_counter() + seconds * len(calls)
        while time.perf_counter() < end or len(times[0]) < 2:
            for i in random.sample(range(len(calls)), len(calls)):  # one call of each, in a new random order
                function, options = calls[i]
                start = time.perf_counter()
                function(query, key, value, **options)
                times[i].append((time.perf_counter() - start) * 1e6)
for text, taken in zip(args.names, times, strict=True):
    low, middle, high = statistics.quantiles(taken, n=4, method="inclusive")
    ratio = statistics.median(mine / first for mine, first in zip(taken, times[0], strict=True))
    spread = f"{middle:.1f} us (quartiles {low:.1f} to {high:.1f}), {len(taken)} calls"
    print(f"{text}: {spread}, {torch.get_num_threads()} threads, median ratio to the first {ratio:.3f}")
