"""Loads that show a device's ceilings (highest rates): matrix products and copies of several sizes, in rounds."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from attnbench.devices import Clock, containers, device
from attnbench.storage.records import COPY, MATMUL, Ceilings, CeilingSample
from attnbench.workloads.workload import Workload

if TYPE_CHECKING:  # simulated machines measure loads without torch
    from torch import Tensor

MIN_SAMPLE_S = 3e-3  # approximate seconds of a sample, if one call is shorter
FEWEST_ROUNDS, MOST_ROUNDS = 3, 10
COPY_STEP = 8  # ratio of the sizes of consecutive copies
SLOW_S = 0.5
"""Longest predicted call of a load, in seconds; longer loads are left out, because smaller ones reach the same rates.
The limit is generous, because with a busy core even the smallest product may take 16 ms."""


@dataclass(kw_only=True)
class Load:
    """A call to time, with its work: a product of `size` x `size` matrices, or a copy of `size` bytes.

    `amount` is the work in FLOPs, or in bytes read and written by a copy. `kind` names the load, and `dtype` is that of
    the computation.
    """

    kind: str
    dtype: str
    size: int
    amount: int
    call: Callable[[], object]
    num_calls: int = 0  # calls of a sample; 0: not calibrated yet
    call_s: float = 0.0  # seconds of a call; 0: not calibrated yet


def ceilings(workload: Workload, limit_s: float, on_turn: Callable[[], object]) -> Ceilings:
    """Measure the rates of products and copies on the workload's device, in about `limit_s` seconds.

    `on_turn` is called before each sample. The caller must have set the number of threads.
    """
    crowding = os.getloadavg()[0] / containers.processors()
    here = device(workload.device)
    samples = measure_loads(here.loads(workload.dtype), here.clock, limit_s, on_turn)
    name, dtype, num_threads = workload.place
    return Ceilings(device=name, dtype=dtype, num_threads=num_threads, samples=samples, crowding=crowding)


def measure_loads(
    loads: Sequence[Load], clock: Clock, limit_s: float, on_turn: Callable[[], object] = lambda: None
) -> tuple[CeilingSample, ...]:
    """Measure loads in rounds, each round in random order, for about `limit_s` seconds; skip loads above SLOW_S.

    There are at least FEWEST_ROUNDS rounds, so that no ceiling depends on one lucky or unlucky moment, and at most
    MOST_ROUNDS. `loads` of one kind and dtype must be sorted by size. `on_turn` is called before each sample.
    """
    start_s, draws = clock.now(), random.Random(0)
    ready: list[Load] = []
    for load in loads:
        smaller = [each for each in ready if (each.kind, each.dtype) == (load.kind, load.dtype)]
        if smaller and smaller[-1].call_s * load.amount / smaller[-1].amount > SLOW_S:
            continue
        on_turn()
        clock.elapsed(load.call, 1)  # the first call does not count
        load.call_s = min(clock.elapsed(load.call, 1) for _ in range(2))
        load.num_calls = max(1, round(MIN_SAMPLE_S / max(load.call_s, clock.resolution_s)))
        ready.append(load)
    samples: list[CeilingSample] = []
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and clock.now() - start_s >= limit_s:
            break
        for load in draws.sample(ready, len(ready)):
            on_turn()
            call_s = clock.elapsed(load.call, load.num_calls) / load.num_calls
            place = load.kind, load.dtype, load.size, load.amount
            samples.append(CeilingSample(*place, value=call_s, num_calls=load.num_calls, round=number))
    return tuple(samples)


def products_and_copies(
    empty: Callable[[str, int], Tensor], dtypes: Iterable[str], sides: Sequence[int], smallest: int, largest: int
) -> list[Load]:
    """Create products of (side, side) matrices in each dtype, and copies of `smallest` to `largest` bytes.

    `empty(dtype, length)` creates a tensor (length,) on the device. The matrices contain normally distributed values,
    because zeros would need less power, and so less time.
    """
    import torch

    loads = []
    for dtype, side in itertools.product(dtypes, sides):
        left, right, product = (empty(dtype, side * side).view(side, side) for _ in range(3))
        draws = torch.Generator(device=left.device).manual_seed(0)
        for operand in (left, right):
            operand.normal_(generator=draws)
        work = partial(torch.mm, left, right, out=product)
        loads.append(Load(kind=MATMUL, dtype=dtype, size=side, amount=2 * side**3, call=work))
    sizes = [smallest]
    while sizes[-1] * COPY_STEP < largest:
        sizes.append(sizes[-1] * COPY_STEP)
    for size in [*sizes, largest]:
        source, target = (empty("float32", size // 4).fill_(1.0) for _ in range(2))
        copied = 2 * size  # each byte is read once and written once
        loads.append(Load(kind=COPY, dtype="float32", size=size, amount=copied, call=partial(target.copy_, source)))
    return loads
