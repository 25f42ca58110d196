"""Profile one call of a case: its operators, and the backend of scaled_dot_product_attention that ran.

A profiled call is slower than a plain one, so its times serve only as shares of the call.
"""

import re
import warnings
from collections.abc import Callable
from contextlib import suppress

from attnbench.case import Case, build, draw_normal, place
from attnbench.contract import Implementation
from attnbench.devices.kernels import observed
from attnbench.devices.recording import busy_s
from attnbench.storage.records import Operators
from attnbench.workloads.workload import Workload

NO_KERNEL = "No available kernel"  # PyTorch's error if no enabled backend can run
TRIGGERED = re.compile(r"\s*\(Triggered internally at [^)]*\)\.?")  # part of PyTorch's warnings that is removed
NO_REASON = re.compile(r"not used because:?$|has been runtime disabled")
"""Pattern of PyTorch's warnings that give no reason: headlines, and notes on backends that were not requested."""


def observe(case: Case, implementation: Implementation, on_step: Callable[[], None]) -> Operators:
    """Profile `case` in at most three calls; `on_step` is called before each call.

    If the workload's direction is backward, the operators are those of the backward pass, and the backend is that of a
    forward call.
    """
    with case.grad_mode():
        on_step()
        _ = case.first
        on_step()
        calls, kernel_s = case.recording.operators(), busy_s(case.recording.kernels())
        forward = calls
        if case.workload.direction == "backward":
            on_step()
            forward = case.device.record(case.output).operators()
    return Operators(
        calls=calls,
        requested=implementation.backend,
        observed=observed(forward),
        copies=implementation.copies,
        kernel_s=kernel_s,
    )


def refusal(workload: Workload, implementation: Implementation, error: RuntimeError) -> str:
    """Return PyTorch's reasons why the requested backend cannot run; "" if `error` has another cause."""
    if not implementation.backend or NO_KERNEL not in str(error):
        return ""
    case = build(workload, implementation, place(draw_normal(workload, 0), workload))
    with case.grad_mode(), suppress(RuntimeError), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case.output()
    lines = [TRIGGERED.sub("", str(warning.message)).strip().rstrip(".") for warning in caught]
    reasons = dict.fromkeys(line for line in lines if line and not NO_REASON.search(line))
    reason = "; ".join(reasons) or "PyTorch gives no reason"
    return f"the {implementation.backend} backend was asked for and cannot run: {reason}"
