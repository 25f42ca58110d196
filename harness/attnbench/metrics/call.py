"""The time of one call, and its memory beyond inputs and mask: exact on the CPU, from the profiler's memory events.

All memory metrics are read from one recorded call (devices/recording.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.devices import device
from attnbench.metrics import Metric
from attnbench.units import show

if TYPE_CHECKING:
    from attnbench.checking.case import Case
    from attnbench.workloads.workload import Workload

OUTSIDE_SHARE = 0.1
"""Least share of the peak for a note on memory outside of torch's allocator."""


def has_caching_allocator(workload: Workload) -> bool:
    """Whether torch keeps freed device memory, as CUDA's allocator does."""
    return device(workload.device).has_caching_allocator


def left_out(case: Case) -> str:
    """A note on device memory that the peak leaves out, if it matters."""
    if case.outside_bytes <= OUTSIDE_SHARE * case.footprint.peak_bytes:
        return ""
    taken = show(case.outside_bytes, "bytes")
    return f"peak memory leaves out {taken} outside of torch's allocator, code of kernels included"


METRIC = {
    # Sampled in randomised interleaved blocks (timing/blocks.py).
    "latency": Metric(unit="s", summary="time of one call, from interleaved blocks", measure=None),
    # All that one call asks for, one allocation after the other. Where it is far more than the peak, memory is taken
    # and given back again and again.
    "allocated_memory": Metric(
        unit="bytes",
        summary="memory of all allocations of one call together",
        measure=lambda case: float(case.footprint.allocated_bytes),
    ),
    # Reserved less allocated: rests of segments that are too small, or cut up, for what is asked.
    "fragmentation": Metric(
        unit="bytes",
        summary="reserved peak less allocated peak of CUDA's allocator",
        measure=lambda case: float(case.footprint.unused_bytes),
        fits=has_caching_allocator,
    ),
    # Each request costs time of its own, and more where the memory was given back to the system before.
    "num_allocations": Metric(
        unit="allocations",
        summary="allocations of one call",
        measure=lambda case: float(case.footprint.num_allocations),
    ),
    # Taken by libraries from the driver, so that no allocator of torch's counts it. Read between calls: what is given
    # back within a call is not in it.
    "outside_memory": Metric(
        unit="bytes",
        summary="device memory that first calls take and keep outside of torch's allocator, code of kernels included",
        measure=lambda case: float(case.outside_bytes),
        fits=has_caching_allocator,
    ),
    # The most that one call holds at once: scratch space inside kernels and the result count.
    "peak_memory": Metric(
        unit="bytes",
        summary="peak memory of one call beyond its inputs",
        measure=lambda case: float(case.footprint.peak_bytes),
        note=left_out,
    ),
    # The allocator takes segments and cuts tensors out of them: this is what other processes miss.
    "reserved_memory": Metric(
        unit="bytes",
        summary="peak of what CUDA's allocator takes from the device, beyond what it had",
        measure=lambda case: float(case.footprint.reserved_bytes),
        fits=has_caching_allocator,
    ),
    # What is still held when a forward call has returned, less the output's own memory: each byte once, whoever keeps
    # it; 0 in inference, which records no graph. Hooks on saved tensors would count inputs, which are there anyway, a
    # tensor once for each operator that saves it, and not what a custom function keeps in addition. An output that is
    # saved too, as flash kernels do, counts as output.
    "saved_memory": Metric(
        unit="bytes",
        summary="memory that a forward call keeps for its backward pass",
        measure=lambda case: float(case.forward_footprint.kept_bytes - case.forward_footprint.result_bytes),
    ),
    # What an implementation could save at the most: inputs and results must be somewhere, whoever computes them.
    "scratch_memory": Metric(
        unit="bytes",
        summary="peak memory of one call beyond its inputs and results",
        measure=lambda case: float(case.footprint.peak_bytes - case.footprint.result_bytes),
    ),
}
