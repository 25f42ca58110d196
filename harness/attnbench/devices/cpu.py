"""The processor: its timer, its caches, and the memory of this process."""

from __future__ import annotations

import mmap
import os
import re
import resource
import shutil
from collections.abc import Callable
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from statistics import median
from time import get_clock_info, perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np
import psutil

from attnbench.devices import Clock, Device, Reading, containers
from attnbench.devices.loads import Load, products_and_copies
from attnbench.devices.recording import Recording, record

if TYPE_CHECKING:  # a description needs no torch
    from torch import Tensor

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
ASSUMED_CACHE_BYTES = 32 * 2**20  # size of the largest cache if the system does not report it
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}
SIDES = (128, 256, 512, 1024)  # side lengths of the products that show the highest rate
SMALLEST_COPY, LARGEST_COPY = 2**14, 2**28
RESERVE_BYTES = 2**27
"""Least reserve in bytes: a worker's limit leaves this much free memory unused, or a tenth of the free memory if that
is more, but at most half of it. The reserve is for pages that the worker shares with its template process until it
writes to them, and for files of tensors, which the limit does not count."""
SHARE_OF_PROBE = 2**16
"""Numbers that each thread of a parallel interference probe copies; torch gives a thread at least half as many."""
NUM_GROUPS = 64  # a sample's calls are timed in at most this many groups, so that a short interruption affects only one
WIDER = {"bfloat16": "float32", "float16": "float32"}
"""By half-precision dtype, a wider dtype that is faster if the processor has no instructions for half precision."""


class CpuClock(Clock):
    """The host's monotonic timer."""

    resolution_s = get_clock_info("perf_counter").resolution
    sample_s = 20e-3  # much longer than the first calls of a sample, whose data is not in the caches yet

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Return the wall time of the calls in seconds."""
        start = perf_counter_ns()
        for _ in repeat(None, num_calls):
            call()
        return (perf_counter_ns() - start) * 1e-9

    def read(self, call: Callable[[], object], num_calls: int, flush: Callable[[], object] | None = None) -> Reading:
        """Time the calls in up to NUM_GROUPS groups or, with `flush`, one by one; `call_s` is the groups' median."""
        size = 1 if flush else -(-num_calls // NUM_GROUPS)
        sizes = [min(size, num_calls - first) for first in range(0, num_calls, size)]
        groups_s = list[float]()
        for number in sizes:
            if flush:
                flush()
            groups_s.append(self.elapsed(call, number))
        call_s = median(group_s / number for group_s, number in zip(groups_s, sizes, strict=True))
        return Reading(elapsed_s=sum(groups_s), call_s=call_s)


class Cpu(Device):
    """The processor as a device."""

    torch_device = "cpu"
    is_host = True
    is_single = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = CpuClock()

    def missing_compiler(self) -> str | None:
        """Return a message if there is no C++ compiler; otherwise None."""
        compiler = os.environ.get("CXX", "g++")  # as in torch/_inductor/config.py
        return None if shutil.which(compiler) else f"torch.compile needs a C++ compiler, and {compiler} is not found"

    def synchronize(self) -> None:
        """Do nothing: the processor has no queue."""

    def record(self, call: Callable[[], object]) -> Recording:
        """Make one call under the profiler, which sees each allocation."""
        return record(call, self.activities)

    @cached_property
    def _beyond_caches(self) -> Tensor:
        import torch

        return torch.empty(2 * self.cache_bytes(), dtype=torch.uint8)

    def cache_bytes(self) -> int:
        """Return the bytes of the largest cache that the system reports; ASSUMED_CACHE_BYTES if it reports none."""
        sizes = [re.fullmatch(r"(\d+)([KMG]?)\s*", path.read_text()) for path in CACHES.glob("index*/size")]
        return max((int(size[1]) * UNITS[size[2]] for size in sizes if size), default=ASSUMED_CACHE_BYTES)

    def flush(self) -> object:
        """Write to a buffer of twice the largest cache's size."""
        return self._beyond_caches.add_(1)

    def interference_probe(self, num_threads: int = 1) -> Callable[[], object]:
        """Return a function with a small matrix product, and a copy that exceeds the first-level caches.

        The product runs in one thread: numpy's `@` would wake the threads of its BLAS, which then spin for a tenth of a
        second on the cores that the next implementation needs. With several threads torch makes the copy, in the same
        threads that implementations use.
        """
        draws = np.random.default_rng(0)
        matrix = draws.standard_normal((64, 64), dtype=np.float32)
        product = np.empty_like(matrix)
        source = draws.standard_normal(2**17, dtype=np.float32)  # 512 KiB
        copy: Callable[[], object] = partial(np.copyto, np.empty_like(source), source)
        if num_threads > 1:
            import torch

            numbers = torch.zeros(SHARE_OF_PROBE * num_threads)
            copy = partial(torch.add, numbers, 1.0, out=torch.empty_like(numbers))

        def work() -> None:
            np.einsum("ij,jk->ik", matrix, matrix, out=product)  # numpy's own loops, without BLAS
            copy()

        return work

    def loads(self, dtype: str) -> list[Load]:
        """Return products in `dtype`, and in float32 if that may be faster; copies of up to twice the largest cache."""
        dtypes = dict.fromkeys([dtype, WIDER.get(dtype, dtype)])
        largest = min(LARGEST_COPY, 2 * self.cache_bytes())  # bytes of each of the copy's two buffers
        return products_and_copies(pages, dtypes, SIDES, SMALLEST_COPY, largest)


DEVICE = Cpu


def pages(dtype: str, length: int) -> Tensor:
    """Create a tensor (length,) in fresh pages of its own, outside of any allocator.

    After malloc has freed a large block, it keeps all freed blocks of up to that size (M_MMAP_THRESHOLD in mallopt(3),
    https://man7.org/linux/man-pages/man3/mallopt.3.html), so that later timings would include fewer page faults.
    """
    import torch

    kind = getattr(torch, dtype)
    mapped = mmap.mmap(-1, length * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=kind)


def limit_memory() -> None:
    """Limit this process's memory: an allocation beyond the free memory then fails, and the system kills no process.

    The limit is the memory that this process has mapped, plus the free memory, minus a reserve. Set it again whenever
    other processes may have taken memory.
    """
    held, (free, _) = psutil.Process().memory_info(), containers.memory()
    limit = getattr(held, "data", held.rss)  # Linux compares the limit with this number
    limit += free - min(max(RESERVE_BYTES, free // 10), free // 2)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
