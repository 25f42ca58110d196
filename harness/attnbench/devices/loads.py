"""Loads that show a machine's ceilings, taken round by round. Knows nothing of torch, as timing/blocks.py.

What they are made of stands in devices/torch_loads.py.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnbench.devices.clock import Clock
from attnbench.storage.ceilings import CeilingSample

MIN_SAMPLE_S = 3e-3
FEWEST_ROUNDS, MOST_ROUNDS = 3, 10
SLOW_S = 0.5
"""A load is left out where a call should last longer than this by the size before it: smaller ones are no slower.

So much, because threads that wait for a busy core take 16 ms for any product, however small."""


@dataclass(kw_only=True)
class Load:
    """One thing to call, and how much one call does (see CeilingSample)."""

    kind: str
    dtype: str
    size: int
    amount: int
    call: Callable[[], object]
    num_calls: int = 0  # of a sample; 0: not calibrated yet
    call_s: float = 0.0


def take(
    loads: Sequence[Load], clock: Clock, limit_s: float, on_turn: Callable[[], object] = lambda: None
) -> tuple[CeilingSample, ...]:
    """Rounds of all loads, warm, each in an order drawn anew, until `limit_s` seconds are spent.

    There are at least FEWEST_ROUNDS, so that a ceiling is never one lucky or unlucky moment, and MOST_ROUNDS at most.
    `loads` of one kind and dtype come smallest first.
    """
    start_s, draws = clock.now(), random.Random(0)
    ready = _calibrated(loads, clock, on_turn)
    samples: list[CeilingSample] = []
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and clock.now() - start_s >= limit_s:
            break
        for load in draws.sample(ready, len(ready)):
            on_turn()
            spent_s = clock.elapsed(load.call, load.num_calls)
            found = CeilingSample(
                kind=load.kind,
                dtype=load.dtype,
                size=load.size,
                amount=load.amount,
                value=spent_s / load.num_calls,
                num_calls=load.num_calls,
                round=number,
            )
            samples.append(found)
    return tuple(samples)


def _calibrated(loads: Sequence[Load], clock: Clock, on_turn: Callable[[], object]) -> list[Load]:
    """The loads that are quick enough, each with the number of calls that fill a sample; first calls do not count."""
    ready: list[Load] = []
    for load in loads:
        smaller = [each for each in ready if (each.kind, each.dtype) == (load.kind, load.dtype)]
        if smaller and smaller[-1].call_s * load.amount / smaller[-1].amount > SLOW_S:
            continue
        on_turn()
        clock.elapsed(load.call, 1)
        load.call_s = min(clock.elapsed(load.call, 1) for _ in range(2))
        load.num_calls = max(1, round(MIN_SAMPLE_S / max(load.call_s, clock.resolution_s)))
        ready.append(load)
    return ready
