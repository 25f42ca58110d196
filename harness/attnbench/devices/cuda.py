"""Everything that is said to CUDA and nowhere else: is there a device, its clock, its memory.

Source of the clock's shape (a spinning kernel hides launch latency): https://github.com/NVIDIA/nvbench.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import torch

SPIN_CYCLES_PER_CALL = 100_000
"""Device cycles to spin while the host queues one call: about 50 us at 1.9 GHz, more than a launch costs."""


def has_device(device: str) -> bool:
    """Whether this machine has the device `cuda` or `cuda:N`."""
    index = torch.device(device).index or 0
    return torch.cuda.is_available() and index < torch.cuda.device_count()


def is_broken(device: str) -> bool:
    """Whether every call fails from now on in this process, as after an illegal memory access.

    Source: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html, errors that corrupt the context.
    """
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return bool(torch.cuda.is_initialized())
    return False


def free_bytes(device: str) -> int:
    """Memory that the device could still give."""
    return torch.cuda.mem_get_info(torch.device(device))[0]


def held_share(device: str) -> float:
    """The share of the device's memory that this process's tensors hold."""
    return torch.cuda.memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory


def count(call: Callable[[], object], device: str) -> tuple[object, dict[str, int]]:
    """The result of one call, and what the allocator counted meanwhile, by the names of `footprint.Footprint`."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    kept = call()
    torch.cuda.synchronize(device)
    return kept, counted(before, torch.cuda.memory_stats(device))


def counted(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What lies between two readings of the allocator, the peaks reset at the first."""
    inputs = before.get("allocated_bytes.all.current", 0)  # a reading is empty before the first allocation
    return {
        "peak_bytes": after["allocated_bytes.all.peak"] - inputs,
        "kept_bytes": after["allocated_bytes.all.current"] - inputs,
        "num_allocations": after["allocation.all.allocated"] - before.get("allocation.all.allocated", 0),
        "allocated_bytes": after["allocated_bytes.all.allocated"] - before.get("allocated_bytes.all.allocated", 0),
        "reserved_bytes": after["reserved_bytes.all.peak"] - inputs,
    }


@contextmanager
def capped(device: str, limit_bytes: int) -> Iterator[None]:
    """Within: the allocator may take so much more of the device than tensors hold now, and fails beyond."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(device).total_memory
    share = min(1.0, (torch.cuda.memory_reserved(device) + limit_bytes) / whole)
    torch.cuda.set_per_process_memory_fraction(share, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def snapshot(call: Callable[[], object], device: str, path: Path) -> None:
    """One call with the allocator's history on; the file opens in https://docs.pytorch.org/memory_viz.

    It holds the call stack of each allocation, and so the paths of source files: it is made on request alone.
    """
    torch.cuda.synchronize(device)
    torch.cuda.memory._record_memory_history(device=device)  # noqa: SLF001 - as its documentation names it
    try:
        kept = call()
        torch.cuda.synchronize(device)
        torch.cuda.memory._dump_snapshot(str(path))  # noqa: SLF001 - likewise
        del kept
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001 - likewise


def probe_work(device: str) -> Callable[[], object]:
    """The interference probe's fixed work on the device: a matrix product and a copy."""
    matrix = torch.ones(512, 512, device=device)
    source = torch.ones(2**22, device=device)
    product, target = torch.empty_like(matrix), torch.empty_like(source)

    def work() -> None:
        torch.matmul(matrix, matrix, out=product)
        target.copy_(source)

    return work


def l2_bytes(device: str) -> int:
    """The size of the device's largest cache."""
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size


class CudaClock:
    """Events on the device's stream: device time, from the first kernel's start to the last one's end."""

    resolution_s = 0.5e-6  # of a CUDA event, as its documentation states

    def __init__(self, device: str) -> None:
        """Use the current stream of `device`."""
        self.device = torch.device(device)

    def now(self) -> float:
        """Seconds of the host's monotonic timer."""
        return time.perf_counter()

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Device time of the calls, queued behind a spinning kernel so that the host's launches are hidden."""
        with torch.cuda.device(self.device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(SPIN_CYCLES_PER_CALL * num_calls)  # noqa: SLF001 - torch has no public spinning kernel
            start.record()
            for _ in repeat(None, num_calls):
                call()
            end.record()
            end.synchronize()
        elapsed_ms: float = start.elapsed_time(end)
        return elapsed_ms * 1e-3
