"""Time the findings about slow calls with torch alone: `python times.py [NAME ...]`.

It prints a line for each finding (by default all): its subject, the times of two calls, and their ratio. The exit code
is 1 if at least one of these findings holds on this machine.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

HIDDEN = {length: torch.ones(length, length, dtype=torch.bool).triu(1) for length in (512, 1024, 2048)}


def tensors(length, dtype=torch.float32, batch=1):
    torch.manual_seed(0)
    return torch.randn(3, batch, 8, length, 64).to(dtype).unbind()


def textbook(query, key, value, hidden=None):
    scores = query @ key.mT * 0.125
    return (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))).softmax(-1) @ value


def seconds(*calls, rounds=9):
    """Return the median seconds of each call; the calls take turns."""
    times = [[] for _ in calls]
    for number in range(rounds + 2):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if number >= 2:
                taken.append(time.perf_counter() - start)
    return [median(taken) for taken in times]


def float16():
    half, single = tensors(512, torch.float16), tensors(512)
    return seconds(lambda: textbook(*half), lambda: textbook(*single))


def page_faults():
    """Time two processes: in one, the C library returns large blocks to the system; in the other, it keeps them."""
    code = "import times; found = times.tensors(2048); print(times.seconds(lambda: times.textbook(*found))[0])"
    keeps, results = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}, []
    for more in ({}, keeps):
        command, here = [sys.executable, "-c", code], Path(__file__).resolve().parent
        environment = {**os.environ, **more}
        results.append(float(subprocess.check_output(command, cwd=here, env=environment, text=True)))  # noqa: S603
    return results


def mask_as_tensor():
    operands = tensors(2048)
    visible = ~HIDDEN[2048]
    return seconds(lambda: sdpa(*operands, attn_mask=visible), lambda: sdpa(*operands, is_causal=True))


def window():
    operands, place = tensors(2048), torch.arange(2048)
    apart = place[:, None] - place
    visible = (apart >= 0) & (apart < 64)
    return seconds(lambda: sdpa(*operands, attn_mask=visible), lambda: sdpa(*operands, is_causal=True))


def padding():
    operands, lengths = tensors(1024, batch=4), torch.tensor([1024, 256, 256, 256])
    visible = (torch.arange(1024) < lengths[:, None])[:, None, None]
    words = tensors(1024), tensors(256, batch=3)
    return seconds(lambda: sdpa(*operands, attn_mask=visible), lambda: [sdpa(*each) for each in words])


def compile():  # noqa: A001 - the name of the finding
    operands = tensors(512)
    compiled = torch.compile(textbook)
    return seconds(lambda: compiled(*operands, HIDDEN[512]), lambda: compiled(*operands))


FINDINGS = {
    "float16": (float16, "textbook attention in float16 and in float32", 2.0),
    "page_faults": (page_faults, "textbook attention at T=2048 with fresh and with kept pages", 1.2),
    "mask_as_tensor": (mask_as_tensor, "a causal mask as a tensor and as is_causal", 1.3),
    "window": (window, "a window of 64 keys and none", 1.3),
    "padding": (padding, "a padded batch and its words alone", 1.3),
    "compile": (compile, "compiled textbook attention with and without a causal mask", 1.2),
}

if __name__ == "__main__":
    shown = 0
    for name in sys.argv[1:] or FINDINGS:
        measure, what, least = FINDINGS[name]
        first, second = measure()
        print(f"{name}: {what}: {first:.3g} s and {second:.3g} s, ratio {first / second:.2f}")
        shown += first / second >= least
    sys.exit(int(shown > 0))
