"""Timing: randomised complete blocks of calibrated samples. Knows nothing of torch, so a virtual clock can drive it.

A block samples every arm of a workload once, in a new random order; the evidence is the ratio inside a block, which a
drift of the machine leaves alone. Source: R. A. Fisher, The Design of Experiments (1935), randomised complete blocks.
"""

import gc
import operator
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import msgspec

from attnbench.devices import Clock
from attnbench.storage.events import TOUCH_BELOW_S
from attnbench.storage.records import PROBE, Arm, Sample

MIN_SAMPLE_S = 1e-3
MIN_SAMPLE_TICKS = 1000
SUSTAINED_SAMPLE_S = 20e-3
"""At a sustained pace: what lies between two samples takes about half a millisecond, in which a device cools."""
PROBE_SAMPLE_S = 0.25e-3
"""Of an interference probe: long enough to be late, and short compared with what is timed."""
DECISIVE = 10
"""A reading so many times as long as a sample must be ends the calibration, whatever shorter ones showed."""
SIMILAR = 1.25
"""Arms of one process whose calls differ by less than this factor from the next are sampled with the same settings."""
MOST_COLD_CALLS = 8
"""Of a sample with cold caches: before each call twice the largest cache is written."""
LONGEST_HEAT, STEADY = 4, 0.02
"""Before sustained samples the arms are called up to so many times as long as asked, until the device's clock has
stayed within this share over the second half of the time."""
ROUND_S = 0.05
"""So long, at least, each arm is called before the clock is read again."""
SETTLED_SHARE = 0.2
"""A process that uses less of a processor than this is taken to be asleep."""


@dataclass(kw_only=True)
class TimedCall:
    """What one arm calls, and, after calibration, how many calls make a sample."""

    arm: Arm
    call: Callable[[], object]
    num_calls: int = 0  # 0: not calibrated yet
    call_s: float = 0.0
    called_s: float = 0.0  # inside all calls so far, untimed ones included
    flags: int = 0  # what is wrong with all of its samples (storage/records.py, `Flag`)
    least_s: float = MIN_SAMPLE_S

    @property
    def sample_s(self) -> float:
        """A sample is at least this long; the interference probe's, which is not compared with others, is short."""
        return PROBE_SAMPLE_S if self.arm == PROBE else self.least_s


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """A few blocks of one workload: epoch and number, and the seed of their orders.

    Where all of them would last longer than `longest_s`, long calls take part in fewer, but in one at least; 0: in all.
    With `sustained_s` its arms are called for so long before, without a pause, and its samples are longer.
    """

    epoch: int
    number: int
    num_blocks: int
    seed: int
    longest_s: float = 0.0
    sustained_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is done and read around every sample.

    `on_turn` is called with each arm before its calls, so that a crash can be blamed on the right one. `count_faults`
    reads the process's count of minor page faults, and `read_load` the number of processes that want to run: of this
    process and this machine, unless the clock belongs to another. `flush`, where given, empties the caches before
    every call. `on_block` is called before the first block and after each. `read_clock` reads the frequency at which
    the device computes; 0: nothing says it.
    """

    on_turn: Callable[[Arm], object] = lambda _: None
    count_faults: Callable[[], int] = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    read_load: Callable[[], float] = (lambda: os.getloadavg()[0]) if hasattr(os, "getloadavg") else lambda: 0.0
    flush: Callable[[], object] | None = None
    on_block: Callable[[], object] = lambda: None
    read_clock: Callable[[], float] = lambda: 0.0


SIMULATED = Conditions(count_faults=lambda: 0, read_load=lambda: 0.0)
"""Where the clock is simulated, nothing is read of this machine."""


def calibrate(timed: TimedCall, clock: Clock) -> None:
    """Double the number of calls until they fill a sample: at least `sample_s`, and 1000 ticks of the clock.

    The quickest reading so far counts: a short call that had to wait would seem long, and be the only call in each of
    its samples.
    """
    target_s = max(timed.sample_s, MIN_SAMPLE_TICKS * clock.resolution_s)
    spent_s = timed.call_s = clock.elapsed(timed.call, 1)  # first calls allocate and compile
    timed.called_s += spent_s
    num_calls = 0
    while not num_calls or (num_calls * timed.call_s < target_s and spent_s < DECISIVE * target_s):
        num_calls = 2 * num_calls or 1
        spent_s = clock.elapsed(timed.call, num_calls)
        timed.called_s += spent_s
        timed.call_s = min(timed.call_s, spent_s / num_calls)
    if num_calls * timed.call_s < target_s:  # a long call that had seemed short
        timed.call_s = spent_s / num_calls
    timed.num_calls = num_calls


class Turn(NamedTuple):
    """How an arm is sampled in a visit."""

    timed: TimedCall
    num_calls: int
    is_touched: bool  # an untimed call comes first


def turns(calls: Sequence[TimedCall], *, is_cold: bool) -> list[Turn]:
    """One for each arm; arms whose calls last about as long get the same settings, on both sides of a threshold."""
    groups: list[list[TimedCall]] = []
    for timed in sorted(calls, key=lambda timed: (timed.sample_s, timed.call_s)):
        last = groups[-1][-1] if groups else None
        if last is not None and last.sample_s == timed.sample_s and timed.call_s <= SIMILAR * last.call_s:
            groups[-1].append(timed)
        else:
            groups.append([timed])
    made: dict[Arm, Turn] = {}
    for group in groups:
        num_calls = min(max(timed.num_calls for timed in group), MOST_COLD_CALLS if is_cold else sys.maxsize)
        is_short = any(timed.call_s < TOUCH_BELOW_S for timed in group)
        for timed in group:
            made[timed.arm] = Turn(timed, num_calls, is_touched=timed.arm != PROBE and is_short and not is_cold)
    return [made[timed.arm] for timed in calls]


def num_blocks_each(ready: Sequence[Turn], at: Visit) -> list[int]:
    """In how many of the visit's first blocks each turn takes part: the longest in fewer, until they fit.

    What has an A/A control, the control and the interference probe are in every block: the others are compared there.
    """
    costs_s = [(turn.num_calls + turn.is_touched) * turn.timed.call_s for turn in ready]
    arms = [turn.timed.arm for turn in ready]
    controls = {arm for arm in arms if arm == arm.as_control()}
    is_shared = [arm == PROBE or arm.as_control() in controls for arm in arms]
    shares = [at.num_blocks] * len(ready)
    shared_s = sum(cost for cost, always in zip(costs_s, is_shared, strict=True) if always)
    while at.longest_s and sum(map(operator.mul, shares, costs_s)) > at.longest_s and max(shares) > 1:
        longest = max(
            (number for number in range(len(ready)) if not is_shared[number] and shares[number] > 1),
            key=lambda number: shares[number] * costs_s[number],
            default=None,
        )
        most = max(shares)
        if longest is not None and shares[longest] * costs_s[longest] >= most * shared_s:
            shares[longest] -= 1
        else:
            shares = [min(share, most - 1) for share in shares]
    return shares


def visit(
    calls: Sequence[TimedCall], clock: Clock, at: Visit, conditions: Conditions = SIMULATED
) -> dict[Arm, tuple[Sample, ...]]:
    """Take the visit's blocks; return each arm's samples in time order. The garbage collector is off meanwhile."""
    draws = random.Random(at.seed)
    samples: dict[Arm, list[Sample]] = {timed.arm: [] for timed in calls}
    was_enabled = gc.isenabled()
    gc.collect(1)  # what is young: all of torch takes a tenth of a second, at each visit of some milliseconds
    gc.disable()
    try:
        for timed in calls:
            timed.least_s = SUSTAINED_SAMPLE_S if at.sustained_s else MIN_SAMPLE_S
            if not timed.called_s:
                conditions.on_turn(timed.arm)
                if timed.num_calls:  # as another process found: the first call in this one allocates
                    timed.called_s = clock.elapsed(timed.call, 1)
                else:
                    calibrate(timed, clock)
                timed.flags = int(clock.inspect(timed.call))
        ready = turns(calls, is_cold=conditions.flush is not None)
        shares = num_blocks_each(ready, at)
        if at.sustained_s:
            heat(ready, clock, at.sustained_s, conditions)
        conditions.on_block()
        for block in range(max(shares)):
            present = [turn for turn, share in zip(ready, shares, strict=True) if block < share]
            for slot, turn in enumerate(draws.sample(present, len(present))):
                conditions.on_turn(turn.timed.arm)
                samples[turn.timed.arm].append(_sample(turn, clock, at, (block, slot), conditions))
            conditions.on_block()
    finally:
        if was_enabled:
            gc.enable()
    return {arm: tuple(taken) for arm, taken in samples.items()}


def heat(ready: Sequence[Turn], clock: Clock, least_s: float, conditions: Conditions) -> None:
    """Call the arms in turn without a pause for `least_s`, and on until the device's clock has settled, or to a limit.

    All arms of a visit share what it does to the device: none is compared with another one that was cooler.
    """
    measured = [turn for turn in ready if turn.timed.arm != PROBE]
    start_s, read = clock.now(), list[tuple[float, float]]()
    while measured:
        for turn in measured:
            conditions.on_turn(turn.timed.arm)
            num_calls = max(turn.num_calls, int(ROUND_S / turn.timed.call_s))
            before_s = clock.now()
            for _ in repeat(None, num_calls):  # behind a block of the clock's the device would rest
                turn.timed.call()
            clock.elapsed(turn.timed.call, 1)  # which waits for all of them
            turn.timed.called_s += clock.now() - before_s
        spent_s = clock.now() - start_s
        read.append((spent_s, conditions.read_clock()))
        late = [frequency for at_s, frequency in read if at_s >= spent_s / 2]
        is_steady = not any(late) or (len(late) > 1 and max(late) - min(late) <= STEADY * max(late))
        if spent_s >= LONGEST_HEAT * least_s or (spent_s >= least_s and is_steady):
            return


def _sample(turn: Turn, clock: Clock, at: Visit, place: tuple[int, int], conditions: Conditions) -> Sample:
    timed, load = turn.timed, conditions.read_load()
    num_untimed = int(turn.is_touched)
    untimed_s = clock.elapsed(timed.call, num_untimed) if num_untimed else 0.0
    start_s, faults = clock.now(), conditions.count_faults()
    reading = clock.read(timed.call, turn.num_calls, conditions.flush)
    timed.called_s += untimed_s + reading.elapsed_s
    return Sample(
        value=reading.elapsed_s / turn.num_calls,
        num_calls=turn.num_calls,
        epoch=at.epoch,
        visit=at.number,
        block=place[0],
        slot=place[1],
        start_s=start_s,
        num_faults=conditions.count_faults() - faults,
        load=load,
        host_s=reading.host_s / turn.num_calls,
        flags=int(reading.flags) | timed.flags,
        num_untimed=num_untimed,
        untimed_s=untimed_s,
    )


def settle(limit_s: float = 0.05, step_s: float = 1e-3) -> None:
    """Wait until the threads of this process sleep: after work they spin for a while, on cores that others need."""
    for _ in range(int(limit_s / step_s)):
        before_s = time.process_time()
        time.sleep(step_s)
        if time.process_time() - before_s < SETTLED_SHARE * step_s:
            return
