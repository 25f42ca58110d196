"""Memory that an implementation keeps after the results of its calls are gone: lists of outputs, caches, graphs.

Masks and tables of the first calls are kept once; memory that grows with each call eventually runs out.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, NamedTuple

from attnbench.metrics import Metric
from attnbench.storage.records import KEPT_MEMORY, KEPT_ONCE
from attnbench.units import show
from attnbench.workloads.counts import score_matrix_bytes

if TYPE_CHECKING:  # metrics can be listed without torch
    from collections.abc import Callable

    from torch import Tensor

    from attnbench.checking.case import Case
    from attnbench.workloads.workload import Workload

FIRST, MORE = 3, 4  # first calls, which may fill caches, and calls after them
CHANGE = 1 - 2**-4  # factor of the inputs from each call to the next: a cache of answers never hits


class Kept(NamedTuple):
    """Bytes that are still allocated after all results are gone."""

    once_bytes: float  # of the first calls together
    each_bytes: float  # of each further call
    output_bytes: int  # the size of an output, for comparison


def measure(case: Case) -> Kept:
    """Measure the memory that calls of a case keep; restores the inputs at the end."""
    inputs = {tensor.untyped_storage().data_ptr(): tensor.detach() for tensor in case.tensors.values()}
    numbers = [tensor.new_empty(0).set_(tensor.untyped_storage()) for tensor in inputs.values()]  # autograd ignores it
    before = [each.clone() for each in numbers]
    try:
        with case.grad_mode():
            call = case.call()
            first, more = _kept_bytes(case, call, numbers, FIRST), _kept_bytes(case, call, numbers, MORE)
            output_bytes = case.output().untyped_storage().nbytes()
    finally:
        for each, values in zip(numbers, before, strict=True):
            each.copy_(values)
    each_bytes = more / MORE
    return Kept(max(0.0, first - FIRST * each_bytes), each_bytes, output_bytes)


def _kept_bytes(case: Case, call: Callable[[], object], numbers: list[Tensor], num_calls: int) -> int:
    """Bytes that some calls keep, each with other numbers as inputs."""

    def repeat() -> None:
        for _ in range(num_calls):
            for each in numbers:
                each.mul_(CHANGE)
            call()
        gc.collect()

    gc.collect()
    return max(0, case.device.record(repeat).footprint().kept_bytes)


def explanation(kept: Kept, workload: Workload) -> str:
    """Explain memory that grows with each call, and guess its content by size; "" if nothing grows."""
    if not kept.each_bytes:
        return ""
    likely = {"as much as its output": kept.output_bytes, "as much as all its scores": score_matrix_bytes(workload)}
    alike = next((words for words, size in likely.items() if size == kept.each_bytes), "")
    return f"keeps {show(kept.each_bytes, 'bytes')} with each call" + f", {alike}" * bool(alike)


def measured(case: Case) -> Kept:
    """The result of `measure`, cached for each case."""
    kept: Kept = vars(case).get("kept") or vars(case).setdefault("kept", measure(case))
    return kept


METRIC = {
    KEPT_MEMORY: Metric(
        unit="bytes",
        summary="memory that each call keeps when its results are gone, after the first calls",
        measure=lambda case: measured(case).each_bytes,
        note=lambda case: explanation(measured(case), case.workload),
        is_column=False,
    ),
    KEPT_ONCE: Metric(
        unit="bytes",
        summary="memory that the first calls keep, such as masks and tables",
        measure=lambda case: measured(case).once_bytes,
        is_column=False,
    ),
}
