"""Metrics of calls: time, memory beyond inputs and mask, memory that calls keep, and the harness's work around a call.

Memory comes from recorded calls (devices/recording.py). On the CPU it is exact, as the profiler records every
allocation. Memory outside of torch's allocator comes from the driver.
"""

from __future__ import annotations

import gc
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from attnbench.devices import device
from attnbench.metrics import Metric
from attnbench.storage.records import KEPT_MEMORY, KEPT_ONCE
from attnbench.units import show
from attnbench.workloads.counts import score_matrix_bytes

if TYPE_CHECKING:  # metrics can be listed without torch
    from collections.abc import Callable

    from torch import Tensor

    from attnbench.case import Case
    from attnbench.contract.outside import Bound
    from attnbench.workloads.workload import Workload

OUTSIDE_SHARE = 0.1  # share of the peak above which memory outside of torch's allocator gets a note
NUM_REPEATS = 5  # number of times that the harness's work outside of a call is timed
FIRST, MORE = 3, 4  # number of first calls, which may fill caches, and of calls after them
CHANGE = 1 - 2**-4  # factor by which inputs change from each call to the next, so that a cache of answers never hits


def is_off_the_host(workload: Workload) -> bool:
    """Return whether the device of a workload has its own memory, for which torch has a caching allocator."""
    return not device(workload.device).is_host


def left_out(case: Case) -> str:
    """Return a note on memory outside of torch's allocator, if it exceeds OUTSIDE_SHARE of the peak memory; else ""."""
    if case.outside_bytes <= OUTSIDE_SHARE * case.footprint.peak_bytes:
        return ""
    taken = show(case.outside_bytes, "bytes")
    return f"peak memory leaves out {taken} outside of torch's allocator, code of kernels included"


def outside_s(case: Case) -> float:
    """Time the harness's work outside of a call, which is never part of the call's time; return the median seconds.

    This work repeats grouped heads, makes additive masks, adds sinks and moves axes (contract/outside.py). Returns 0 if
    a call needs no such work.
    """
    bind = getattr(case.module, "bind", None)
    if bind is None:
        return 0.0
    case.hand_over_operands()
    with case.grad_mode():
        bound: Bound = bind(case.tensors["query"], case.tensors["key"], case.tensors["value"], case.mask)
        if bound.is_plain:
            return 0.0
        return median(case.device.clock.elapsed(bound.prepare, 1) for _ in range(NUM_REPEATS))


class Kept(NamedTuple):
    """Bytes that calls leave allocated once all results are gone, for example in caches, graphs or lists of outputs.

    Masks and tables that only the first calls keep are harmless. If each further call keeps more, memory eventually
    runs out.
    """

    once_bytes: float  # of the FIRST calls together, minus `each_bytes` for each of them
    each_bytes: float  # of each further call
    output_bytes: int  # the size of an output, for comparison


def measure_kept(case: Case) -> Kept:
    """Measure the memory that calls of a case keep. The calls change the inputs, which are restored at the end."""
    inputs = {tensor.untyped_storage().data_ptr(): tensor.detach() for tensor in case.tensors.values()}
    numbers = [tensor.new_empty(0).set_(tensor.untyped_storage()) for tensor in inputs.values()]  # hidden from autograd
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
    """Measure the bytes that `num_calls` calls keep together; the inputs change before each call."""

    def repeat() -> None:
        for _ in range(num_calls):
            for each in numbers:
                each.mul_(CHANGE)
            call()
        gc.collect()

    gc.collect()
    return max(0, case.device.record(repeat).footprint().kept_bytes)


def growth(kept: Kept, workload: Workload) -> str:
    """Describe the memory that each call keeps, and guess from its size what it is; "" if a call keeps none."""
    if not kept.each_bytes:
        return ""
    likely = {"as much as its output": kept.output_bytes, "as much as all its scores": score_matrix_bytes(workload)}
    alike = next((words for words, size in likely.items() if size == kept.each_bytes), "")
    return f"keeps {show(kept.each_bytes, 'bytes')} with each call" + f", {alike}" * bool(alike)


def kept_by(case: Case) -> Kept:
    """Return the memory that calls of a case keep; it is measured only once for each case."""
    kept: Kept = vars(case).get("kept") or vars(case).setdefault("kept", measure_kept(case))
    return kept


METRIC = {
    KEPT_MEMORY: Metric(
        unit="bytes",
        summary="memory that each call keeps when its results are gone, after the first calls",
        measure=lambda case: kept_by(case).each_bytes,
        note=lambda case: growth(kept_by(case), case.workload),
        is_column=False,
    ),
    KEPT_ONCE: Metric(
        unit="bytes",
        summary="memory that the first calls keep, such as masks and tables",
        measure=lambda case: kept_by(case).once_bytes,
        is_column=False,
    ),
    # Sampled in randomised interleaved blocks (timing/blocks.py). Several ranks on a device other than the host have no
    # latency, since it would include the exchange of their tensors through the host.
    "latency": Metric(
        unit="s",
        summary="time of one call, from interleaved blocks",
        measure=None,
        fits=lambda workload: workload.world_size == 1 or not is_off_the_host(workload),
    ),
    # Libraries allocate this memory from the driver, outside of torch's allocator. It is read between calls, so memory
    # that is freed within a call is not included.
    "outside_memory": Metric(
        unit="bytes",
        summary="device memory that first calls take and keep outside of torch's allocator, code of kernels included",
        measure=lambda case: float(case.outside_bytes),
        fits=is_off_the_host,
    ),
    "outside_time": Metric(
        unit="s",
        summary="time of the harness's work outside a function's call, which is not in the call's time",
        measure=outside_s,
        fits=lambda workload: workload.scope == "attention",
    ),
    # The peak during one call, including the result and scratch space inside kernels.
    "peak_memory": Metric(
        unit="bytes",
        summary="peak memory of one call beyond its inputs",
        measure=lambda case: float(case.footprint.peak_bytes),
        note=left_out,
    ),
    # Memory in use after a forward call, without the output; 0 in inference, which records no graph. Hooks on saved
    # tensors would be wrong: they count inputs, count a tensor once for each operator that saves it, and miss memory
    # that a custom function keeps. A saved output, as in flash kernels, counts as output.
    "saved_memory": Metric(
        unit="bytes",
        summary="memory that a forward call keeps for its backward pass",
        measure=lambda case: float(case.forward_footprint.kept_bytes - case.forward_footprint.result_bytes),
    ),
    # Only this memory can be saved, since inputs and results need the same memory in every implementation.
    "scratch_memory": Metric(
        unit="bytes",
        summary="peak memory of one call beyond its inputs and results",
        measure=lambda case: float(case.footprint.peak_bytes - case.footprint.result_bytes),
    ),
}
