"""A trace of one case: a few steps under torch.profiler, in a pass of their own, checked before and never timed.

Each phase of a step is a module, `Forward` or `Backward`, whatever the implementation is: so the viewer has modules to
show even where `attend` is called by itself, and its DIFF tab finds the same phases in every run.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from attnbench.checking.case import Case
from attnbench.tracing import folders, tidy

NUM_WARM_STEPS = 2
"""Untraced steps under the profiler, which slow it down at first; a call without it has gone before."""
NUM_STEPS = 3


class Forward(nn.Module):
    """One forward call of a case."""

    def __init__(self, case: Case) -> None:
        """Keep the case; its module is none of ours, so that it is no submodule either."""
        super().__init__()
        self.case = case

    def forward(self) -> Tensor:
        """Scope `attention`: (B, H, T, V); scope `module`: (B, T, D)."""
        return self.case.output()


class Backward(nn.Module):
    """The gradients of a case's output with respect to its leaves."""

    def __init__(self, case: Case) -> None:
        """Keep the leaves."""
        super().__init__()
        self.leaves = list(case.leaves.values())
        self.keeps_graph = case.workload.direction == "backward"

    def forward(self, output: Tensor, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """A gradient for each leaf, None where it has no part in `output`."""
        return torch.autograd.grad(output, self.leaves, grad_output, retain_graph=self.keeps_graph, allow_unused=True)


def stepper(case: Case) -> Callable[[], object]:
    """What a step calls: the phases that the workload's direction names."""
    forward, backward = Forward(case), Backward(case)
    if case.workload.direction in {"inference", "forward"}:
        return forward
    output = forward()
    grad_output = torch.ones_like(output) / output.numel() ** 0.5
    if case.workload.direction == "backward":
        return partial(backward, output, grad_output)
    return lambda: backward(forward(), grad_output)


def trace(case: Case, file: Path, on_step: Callable[[], None]) -> int:
    """Write a trace of the case to `file`, and return its bytes; `on_step` is called before each step.

    Raises:
        OSError: the file cannot be written.
        Exception: whatever the implementation raises.
    """
    with case.grad_mode():
        step = stepper(case)
        step()
        with profile(
            activities=[getattr(ProfilerActivity, name) for name in case.device.activities],
            schedule=schedule(wait=0, warmup=NUM_WARM_STEPS, active=NUM_STEPS, repeat=1),
            record_shapes=True,  # Operator view, by shape
            profile_memory=True,  # Memory view
            with_stack=True,  # call stacks, and with the next the Module view
            with_modules=True,
            acc_events=True,
        ) as seen:
            for _ in range(NUM_WARM_STEPS + NUM_STEPS):
                on_step()
                step()
                case.device.synchronize()  # the kernels of a step belong to it
                seen.step()
    on_step()
    return _write(seen, file)


def _write(seen: profile, file: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="attnbench-trace-") as folder:
        raw = Path(folder) / "raw.json"
        seen.export_chrome_trace(str(raw))
        found = msgspec.json.decode(raw.read_bytes())
    return folders.write(file, tidy.tidied(found))
