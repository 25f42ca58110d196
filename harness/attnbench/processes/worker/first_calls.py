"""Time the first call of an implementation in this process, and its first call at another length.

Inputs and mask are made beforehand, so that torch and the device are ready. The time of the first call includes the
import of the implementation's file, building, compiling, and the call.
"""

import os
import time
from collections.abc import Callable, Mapping

import msgspec

from attnbench.case import Case, bind, build, draw_normal, place, reason_against
from attnbench.contract import Implementation
from attnbench.processes.messages import FirstCalls
from attnbench.workloads.workload import Workload

LONGER = 16  # tokens to add: kernels compiled for the first length do not fit, but the call takes hardly longer


def measure(workload: Workload, load: Callable[[], Implementation], settings: Mapping[str, str]) -> FirstCalls:
    """Time the first call in this process and, if supported, the first call at another length, in seconds.

    `settings` are environment variables to set first; a value of "" unsets one. `load` imports the implementation.
    """
    for name, value in settings.items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value
    inputs, mask = place(draw_normal(workload, 0), workload), bind(workload)
    start_s = time.perf_counter()
    candidate = load()
    case = build(workload, candidate, inputs, mask)
    first_s = _called(case, start_s)
    longer = at_other_length(workload)
    if longer is None or reason_against(candidate, longer) is not None:
        return FirstCalls(first_s=first_s, longer_s=None)
    needs_grad = workload.direction != "inference"
    drawn = place(draw_normal(longer, 0), longer).tensors
    tensors = {name: tensor.detach().requires_grad_(needs_grad) for name, tensor in drawn.items()}
    other = Case(workload=longer, module=case.module, tensors=tensors, mask=bind(longer))
    return FirstCalls(first_s=first_s, longer_s=_called(other, time.perf_counter()))


def at_other_length(workload: Workload) -> Workload | None:
    """Return the workload at a slightly larger length; None if it does not allow that length.

    It has LONGER (16) more keys and, unless it has a single query, as many more queries.
    """
    seq_len = workload.seq_len + (LONGER if workload.seq_len > 1 else 0)
    try:
        return msgspec.structs.replace(workload, seq_len=seq_len, kv_len=workload.kv_len + LONGER)
    except ValueError:
        return None


def _called(case: Case, start_s: float) -> float:
    """Make one call, wait for the device, and return the seconds since `start_s`."""
    with case.grad_mode():
        case.call()()
    case.device.synchronize()
    return time.perf_counter() - start_s
