"""The time of what the harness does outside a function's call, which is never part of the call's time.

It repeats grouped heads, makes masks of numbers, adds sinks and moves axes (contract/outside.py).
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from attnbench.metrics import Metric
from attnbench.units import show

if TYPE_CHECKING:
    from attnbench.checking.case import Case
    from attnbench.contract.outside import Bound
    from attnbench.workloads.workload import Workload

NUM_REPEATS = 5


def has_functions(workload: Workload) -> bool:
    """Whether functions are called without the projections, as in scope `attention`."""
    return workload.scope == "attention"


def seconds(case: Case) -> float:
    """The median time of the work outside one call; 0 if the function gets the inputs as they are."""
    bind = getattr(case.module, "bind", None)
    if bind is None:
        return 0.0
    case.hand_over_operands()
    with case.grad_mode():
        bound: Bound = bind(case.tensors["query"], case.tensors["key"], case.tensors["value"], case.mask)
        if bound.is_plain:
            return 0.0
        return median(case.device.clock.elapsed(bound.prepare, 1) for _ in range(NUM_REPEATS))


def explanation(case: Case) -> str:
    """Say how long the work outside takes; "" if there is none."""
    outside_s = seconds(case)
    return f"the harness prepares a call in {show(outside_s, 's')}, which is not in its time" if outside_s else ""


METRIC = {
    "outside_time": Metric(
        unit="s",
        summary="time of the harness's work outside a function's call, which is not in the call's time",
        measure=seconds,
        fits=has_functions,
        note=explanation,
    )
}
