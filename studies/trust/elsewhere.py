"""Verdicts of two public benchmarks' rules on a candidate, reimplemented in a few lines for the processor.

KernelBench (eval.py): outputs on five seeds within 1e-4, absolute and relative; then three warm-up calls and the mean
of the timed ones, all on the same inputs; the reference is timed after it in the same process, and ten times its speed
is flagged. reference-kernels (eval.py of gpu-mode): a fresh input for each timed call, whose output is compared at once
within 2e-2, after the clock has stopped. Both import the candidate into the process that judges and times, and time by
its clock. Theirs runs on CUDA events, ours on time.perf_counter. As theirs, it runs the forward pass alone.

Run as `python -m studies.trust.elsewhere SOURCE OUTPUT SETTINGS`; each rule has a forked process of its own.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Attend = Callable[..., Tensor]
LIMIT_S = 30.0
NUM_SEEDS, NUM_WARM, NUM_TIMED = 5, 3, 20
FLAGGED = 10.0
"""KernelBench flags a candidate that is this many times faster than its reference."""


def inputs(seed: int, settings: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """Draw query, key and value (B, H, T, K), and the causal mask (T, T)."""
    torch.manual_seed(seed)
    length = settings["seq_len"]
    tensors = [torch.randn(settings["batch_size"], settings["num_heads"], length, 64) for _ in range(3)]
    return tensors, torch.ones(length, length, dtype=torch.bool).tril()


def reference(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor) -> Tensor:
    """Compute PyTorch's own attention."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def seconds(attend: Attend, tensors: list[Tensor], mask: Tensor) -> float:
    """Measure the mean time of calls on the same inputs."""
    for _ in range(NUM_WARM):
        attend(*tensors, mask=mask)
    taken = []
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        attend(*tensors, mask=mask)
        taken.append(time.perf_counter() - start)
    return sum(taken) / len(taken)


def kernelbench(attend: Attend, settings: dict[str, Any]) -> dict[str, Any]:
    """Require right answers on five seeds, then time one input."""
    for seed in range(NUM_SEEDS):
        tensors, mask = inputs(seed, settings)
        expected = reference(*tensors, mask=mask)
        if not torch.allclose(attend(*tensors, mask=mask), expected, atol=1e-4, rtol=1e-4):
            return {"says": "wrong"}
    tensors, mask = inputs(42, settings)
    mine, others = seconds(attend, tensors, mask), seconds(reference, tensors, mask)
    speedup = others / mine if mine > 0 else float("inf")
    return {"says": "flagged" if speedup > FLAGGED else "time", "time_s": mine, "speedup": speedup}


def reference_kernels(attend: Attend, settings: dict[str, Any]) -> dict[str, Any]:
    """Time each call on its own input, and compare its output."""
    taken = []
    for seed in range(NUM_TIMED):
        tensors, mask = inputs(13 * seed, settings)
        copies = [tensor.clone() for tensor in tensors]
        start = time.perf_counter()
        output = attend(*tensors, mask=mask)
        taken.append(time.perf_counter() - start)
        if not torch.allclose(output, reference(*copies, mask=mask), atol=2e-2, rtol=2e-2):
            return {"says": "wrong"}
    return {"says": "time", "time_s": sum(taken) / len(taken)}


RULES = {"KernelBench": kernelbench, "reference-kernels": reference_kernels}


def load(path: Path) -> Attend:
    """Import the candidate's `attend` into this process; these benchmarks take no classes."""
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if isinstance(module.attend, type):
        module.make_change()
        return module.honest  # type: ignore[no-any-return] # the candidate's own function
    return module.attend  # type: ignore[no-any-return] # likewise


def judge(rule: str, source: Path, output: Path, settings: dict[str, Any]) -> None:
    """Write the verdict of a rule, in a process as it would use."""
    with torch.no_grad():
        try:
            said = RULES[rule](load(source), settings)
        except Exception as error:  # noqa: BLE001 - whatever the candidate raises
            said = {"says": f"error ({type(error).__name__})"}
    output.with_suffix(f".{rule}").write_text(json.dumps(said), encoding="utf-8")


def main() -> None:
    """Fork a process for each rule, and kill those that hang."""
    source, output, settings = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), json.loads(sys.argv[3])
    for rule in RULES:
        child = os.fork()
        if child == 0:
            judge(rule, source, output, settings)
            os._exit(0)
        end_s = time.monotonic() + LIMIT_S
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > end_s:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.01)
    made = {}
    for rule in RULES:
        written = output.with_suffix(f".{rule}")
        made[rule] = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {"says": "no answer"}
    output.write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    main()
