"""The loads that show a device's ceilings: matrix products and copies of several sizes, by torch."""

import mmap
import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attnbench.devices.caches import largest_bytes
from attnbench.devices.clock import Clock
from attnbench.devices.loads import Load, take
from attnbench.storage.ceilings import COPY, MATMUL, Ceilings
from attnbench.workloads.workload import Workload

SIDES = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
WIDER = {"cpu": {"bfloat16": "float32", "float16": "float32"}}
"""Where a dtype may be computed faster in another that holds all its values: half precision without hardware for it."""
SMALLEST_COPY = {"cpu": 2**14, "cuda": 2**22}
COPY_STEP = 8
BEYOND_CACHE = 2
"""The two buffers of the largest copy are each this many times as large as the largest cache."""
LARGEST_COPY = 2**28


def ceilings(workload: Workload, clock: Clock, limit_s: float, on_turn: Callable[[], object]) -> Ceilings:
    """What products and copies reach where the workload runs, in about `limit_s` seconds; the threads are set."""
    crowding = os.getloadavg()[0] / (os.cpu_count() or 1)
    made = loads_of(workload.device, workload.dtype, largest_bytes(workload.device))
    samples = take(made, clock, limit_s, on_turn)
    device, dtype, num_threads = workload.place
    return Ceilings(device=device, dtype=dtype, num_threads=num_threads, samples=samples, crowding=crowding)


def loads_of(device: str, dtype: str, cache_bytes: int) -> list[Load]:
    """Those for one device and dtype; `cache_bytes` is the size of its largest cache."""
    kind = device.partition(":")[0]
    dtypes = dict.fromkeys([dtype, WIDER.get(kind, {}).get(dtype, dtype)])
    products = [_product(device, name, side) for name in dtypes for side in SIDES[kind]]
    largest = min(LARGEST_COPY, BEYOND_CACHE * cache_bytes)
    sizes = [SMALLEST_COPY[kind]]
    while sizes[-1] * COPY_STEP < largest:
        sizes.append(sizes[-1] * COPY_STEP)
    return [*products, *(_copy(device, size) for size in [*sizes, largest])]


def _product(device: str, dtype: str, side: int) -> Load:
    """(side, side) @ (side, side) of normal values: zeros would take less power, and so less time."""
    made = torch.Generator(device=device).manual_seed(0)
    left, right, product = (_empty(device, dtype, side * side).view(side, side) for _ in range(3))
    for operand in (left, right):
        operand.normal_(generator=made)
    work = partial(torch.mm, left, right, out=product)
    return Load(kind=MATMUL, dtype=dtype, size=side, amount=2 * side**3, call=work)


def _copy(device: str, size: int) -> Load:
    """So many bytes from one buffer into another: read once, written once."""
    source, target = (_empty(device, "float32", size // 4).fill_(1.0) for _ in range(2))
    return Load(kind=COPY, dtype="float32", size=size, amount=2 * size, call=partial(target.copy_, source))


def _empty(device: str, dtype: str, length: int) -> Tensor:
    """So many numbers; on the CPU in pages of their own, which no allocator has handed out.

    When malloc gets a large block back, it keeps larger ones from then on (M_MMAP_THRESHOLD in mallopt(3),
    https://man7.org/linux/man-pages/man3/mallopt.3.html), and what is timed later would pay for fewer page faults.
    """
    kind = getattr(torch, dtype)
    if device != "cpu":
        return torch.empty(length, dtype=kind, device=device)
    pages = mmap.mmap(-1, length * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=kind)
