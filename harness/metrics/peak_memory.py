"""The most memory that one call holds at once, beyond its inputs: exact on the CPU, from the profiler's memory events.

Every allocation and release of the call is an event; the peak of their running sum includes the scratch space inside
kernels. The resident set of the process would not do: after a first call it does not grow any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.metrics import Metric

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.case import Case


def measure(case: Case) -> float:
    """Bytes at the peak of one call, inputs and mask not counted, output counted."""
    call = case.call()
    device = case.workload.device
    with case.grad_mode():
        call()  # kept tensors, such as the dense mask, are made by a first call
        if device == "cpu":
            return float(peak_on_cpu(call))
        from harness import cuda

        return float(cuda.peak_bytes(call, device))


def peak_on_cpu(call: Callable[[], object]) -> int:
    """Bytes at the peak of one call on the CPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = call()
    del kept
    held = peak = 0
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


METRIC = Metric(unit="bytes", summary="peak memory of one call beyond its inputs", measure=measure)
