"""Timing: randomised complete blocks of calibrated samples. Knows nothing of torch, so a virtual clock can drive it.

A block samples every arm of a workload once, in an order drawn anew; the evidence is the ratio inside a block, which a
drift of the machine leaves alone. Source: R. A. Fisher, The Design of Experiments (1935), randomised complete blocks.
"""

import gc
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from attnbench.devices.clock import Clock
from attnbench.storage.events import TOUCH_BELOW_S
from attnbench.storage.records import Sample

MIN_SAMPLE_S = 1e-3
MIN_SAMPLE_TICKS = 1000
CANARY_SAMPLE_S = 0.25e-3
"""Of a canary: long enough to be late, and short beside what it watches over."""
BELIEVED = 10
"""A reading so many times as long as a sample must be ends the calibration, whatever shorter ones said."""
CLOSE = 1.25
"""Arms of one process whose calls differ by less than this factor from the next are sampled alike, as the same code."""
MOST_COLD_CALLS = 8
"""Of a sample with cold caches: before each call twice the largest cache is written."""
SETTLED_SHARE = 0.2
"""A process that uses less of a processor than this is taken to sleep."""


@dataclass(kw_only=True)
class Arm:
    """One contender of a block: what to call, and, once calibrated, how many calls make a sample."""

    name: str
    call: Callable[[], object]
    num_calls: int = 0  # 0: not calibrated yet
    call_s: float = 0.0
    called_s: float = 0.0  # inside all calls so far, untimed ones included
    sample_s: float = MIN_SAMPLE_S  # at least this long
    is_touched: bool = True  # an untimed call comes first, where calls are short


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A few blocks of one workload: where they stand and how their orders are drawn."""

    epoch: int
    number: int
    num_blocks: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What surrounds every sample.

    `on_turn` hears of each arm before it is called, so that a crash can be laid at the right door; `count_faults`
    reads the process's count of minor page faults and `read_load` how many processes want to run, both as the machine
    says that the clock belongs to; `flush`, where given, empties the caches before every call.
    """

    on_turn: Callable[[Arm], None] = lambda _: None
    count_faults: Callable[[], int] = lambda: 0
    read_load: Callable[[], float] = lambda: 0.0
    flush: Callable[[], object] | None = None


WARM = Conditions()


def here(on_turn: Callable[[Arm], None] = lambda _: None, flush: Callable[[], object] | None = None) -> Conditions:
    """The conditions on a real machine: its load, and the page faults of this process."""
    return Conditions(
        on_turn=on_turn,
        count_faults=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        read_load=(lambda: os.getloadavg()[0]) if hasattr(os, "getloadavg") else lambda: 0.0,
        flush=flush,
    )


def canary_arm(name: str, call: Callable[[], object]) -> Arm:
    """An arm that shows how the machine is, and is not compared with others: short, and without an untimed call."""
    return Arm(name=name, call=call, sample_s=CANARY_SAMPLE_S, is_touched=False)


def calibrate(arm: Arm, clock: Clock) -> None:
    """Double the number of calls until they fill a sample: at least the arm's, and 1000 ticks of the clock.

    A short call that once had to wait seems long, and would be alone in all its samples: what counts is the quickest
    reading so far.
    """
    target_s = max(arm.sample_s, MIN_SAMPLE_TICKS * clock.resolution_s)
    spent_s = arm.call_s = clock.elapsed(arm.call, 1)  # first calls allocate and compile
    arm.called_s += spent_s
    num_calls = 0
    while not num_calls or (num_calls * arm.call_s < target_s and spent_s < BELIEVED * target_s):
        num_calls = 2 * num_calls or 1
        spent_s = clock.elapsed(arm.call, num_calls)
        arm.called_s += spent_s
        arm.call_s = min(arm.call_s, spent_s / num_calls)
    if num_calls * arm.call_s < target_s:  # a long call that once seemed short
        arm.call_s = spent_s / num_calls
    arm.num_calls = num_calls


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How an arm is sampled in a visit."""

    arm: Arm
    num_calls: int
    is_touched: bool


def turns(arms: Sequence[Arm], *, is_cold: bool) -> list[Turn]:
    """One for each arm; those whose calls last about as long go alike, though one was just below a threshold."""
    groups: list[list[Arm]] = []
    for arm in sorted(arms, key=lambda arm: (arm.sample_s, arm.call_s)):
        last = groups[-1][-1] if groups else None
        if last is not None and last.sample_s == arm.sample_s and arm.call_s <= CLOSE * last.call_s:
            groups[-1].append(arm)
        else:
            groups.append([arm])
    found = {turn.arm.name: turn for group in groups for turn in _alike(group, is_cold=is_cold)}
    return [found[arm.name] for arm in arms]


def _alike(group: Sequence[Arm], *, is_cold: bool) -> Iterator[Turn]:
    num_calls = max(arm.num_calls for arm in group)
    is_short = any(arm.call_s < TOUCH_BELOW_S for arm in group)
    for arm in group:
        if is_cold:
            yield Turn(arm=arm, num_calls=min(num_calls, MOST_COLD_CALLS), is_touched=False)
        else:
            yield Turn(arm=arm, num_calls=num_calls, is_touched=arm.is_touched and is_short)


def visit(arms: Sequence[Arm], clock: Clock, at: Visit, conditions: Conditions = WARM) -> dict[str, tuple[Sample, ...]]:
    """Take the visit's blocks; return each arm's samples in time order. The garbage collector rests meanwhile."""
    draws = random.Random(at.seed)
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    with _without_garbage_collector():
        for arm in arms:
            if not arm.num_calls:
                conditions.on_turn(arm)
                calibrate(arm, clock)
        ready = turns(arms, is_cold=conditions.flush is not None)
        for block in range(at.num_blocks):
            for slot, taken in enumerate(draws.sample(ready, len(ready))):
                conditions.on_turn(taken.arm)
                samples[taken.arm.name].append(_sample(taken, clock, at, (block, slot), conditions))
    return {name: tuple(taken) for name, taken in samples.items()}


@contextmanager
def _without_garbage_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect(1)  # what is young: all of torch takes a tenth of a second, at each visit of some milliseconds
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _sample(turn: Turn, clock: Clock, at: Visit, place: tuple[int, int], conditions: Conditions) -> Sample:
    arm, load = turn.arm, conditions.read_load()
    if turn.is_touched:
        arm.called_s += clock.elapsed(arm.call, 1)
    start_s, faults = clock.now(), conditions.count_faults()
    flush = conditions.flush
    spent_s = clock.elapsed(arm.call, turn.num_calls) if flush is None else _cold(turn, clock, flush)
    arm.called_s += spent_s
    return Sample(
        value=spent_s / turn.num_calls,
        num_calls=turn.num_calls,
        epoch=at.epoch,
        visit=at.number,
        block=place[0],
        slot=place[1],
        start_s=start_s,
        num_faults=conditions.count_faults() - faults,
        load=load,
    )


def _cold(turn: Turn, clock: Clock, flush: Callable[[], object]) -> float:
    """Seconds of the calls alone, each after a flush."""
    spent_s = 0.0
    for _ in range(turn.num_calls):
        flush()
        spent_s += clock.elapsed(turn.arm.call, 1)
    return spent_s


def settle(limit_s: float = 0.05, step_s: float = 1e-3) -> None:
    """Return when the threads of this process sleep: those that have just worked spin for a while, on others' cores."""
    for _ in range(int(limit_s / step_s)):
        before_s = time.process_time()
        time.sleep(step_s)
        if time.process_time() - before_s < SETTLED_SHARE * step_s:
            return
