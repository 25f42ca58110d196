"""Timing: randomised complete blocks of samples. Knows nothing of torch, so a virtual clock can drive it.

A block samples every arm of a workload once, in a new random order; the evidence is the ratio inside a block, which a
drift of the machine leaves alone. Source: R. A. Fisher, The Design of Experiments (1935), randomised complete blocks.

All arms of a visit are treated alike: the same number of calls in a sample, the same untimed calls before it. Otherwise
one slow reading of one arm would make identical code look different for the rest of the process.
"""

import gc
import math
import operator
import os
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle, repeat
from statistics import median
from typing import NamedTuple

import msgspec

from attnbench.devices import Clock
from attnbench.devices.waiting import own_waits_s
from attnbench.storage.events import TOUCH_BELOW_S
from attnbench.storage.records import PROBE, Arm, Flag, Sample

MIN_SAMPLE_S = 1e-3
MIN_SAMPLE_TICKS = 1000
SUSTAINED_SAMPLE_S = 20e-3
"""At a sustained pace: what lies between two samples takes about half a millisecond, in which a device cools."""
NUM_PROBE_CALLS, PROBE_SAMPLE_S = 4, 0.3e-3
"""A sample of the interference probe, and what it takes, about: long enough to be late, and short next to the arms."""
WARM_S = 20e-3
"""The process computes for this long before the first sample of a visit, because calls after a pause are slower: see
"After a pause" in docs/method.md."""
LONGEST_WARMED = 25
"""Where each call lasts this many times as long as that, the pause changes no call by more than a hundredth or two."""
FEWEST_ROUNDS, DECISIVE = 3, 10
"""A calibration has at least three rounds, since one reading may be late; one is enough where every call lasts ten
times as long as a sample must."""
MOST_TIMES = 100
"""No sample lasts more than this many times as long as it must: next to a far slower arm the others get fewer calls."""
MOST_COLD_CALLS = 8
"""Of a sample with cold caches: before each call twice the largest cache is written."""
LONGEST_HEAT, STEADY = 4, 0.02
"""Before sustained samples the arms are called up to so many times as long as asked, until the device's clock has
stayed within this share over the second half of the time."""
ROUND_S = 0.05
"""So long, at least, each arm is called before the clock is read again."""
MOST_READ = 64
"""Samples of an arm from which the typical time of its call is taken: its latest."""
WAITED = 0.1
"""A sample whose threads waited for a processor for a larger share of its time is disturbed: on an idle machine, where
threads wake one another, one of twenty samples comes to half of that."""
SETTLED_SHARE = 0.2
"""A process that uses less of a processor than this is taken to be asleep."""


@dataclass(kw_only=True)
class TimedCall:
    """A callable, and what is known of it in this process."""

    arm: Arm
    call: Callable[[], object]
    called_s: float = 0.0  # inside all calls so far, untimed ones included; 0: not called yet
    flags: int = 0  # what is wrong with all of its samples (storage/records.py, `Flag`)


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The typical seconds of a call of an arm, from all of its samples so far."""

    arm: Arm
    call_s: float


def known(samples: Mapping[Arm, Sequence[Sample]]) -> tuple[Known, ...]:
    """The typical time of a call of each arm, the median of its latest samples; the probe has none."""
    return tuple(
        Known(arm=arm, call_s=median(sample.value for sample in own[-MOST_READ:]))
        for arm, own in samples.items()
        if own and arm != PROBE
    )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How the arms of a visit are sampled, all of them alike; the probe always has its own number of calls."""

    num_calls: int
    is_touched: bool  # an untimed call precedes each sample
    is_warmed: bool  # the process computes for WARM_S before the first sample


class Untimed(NamedTuple):
    """Untimed calls, of one arm or several, and the seconds that they took."""

    num_calls: int
    spent_s: float

    def extended(self, timed: TimedCall, clock: Clock, num_calls: int) -> "Untimed":
        """Make more of them."""
        elapsed_s = clock.elapsed(timed.call, num_calls)
        timed.called_s += elapsed_s
        return Untimed(self.num_calls + num_calls, self.spent_s + elapsed_s)


NO_CALLS = Untimed(0, 0.0)


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """A few blocks of one workload: epoch and number, and the seed of their orders.

    Where all of them would last longer than `longest_s`, long calls take part in fewer, but in one at least; 0: in all.
    With `sustained_s` its arms are called for so long before, without a pause, and its samples are longer. The settings
    follow from `known`, which may name arms of other processes, too: all processes of a visit choose the same. Where an
    arm of the visit is missing there, all are calibrated.
    """

    epoch: int
    number: int
    num_blocks: int
    seed: int
    longest_s: float = 0.0
    sustained_s: float = 0.0
    known: tuple[Known, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is done and read around every sample.

    `on_turn` is called with each arm before its calls, so that a crash can be blamed on the right one. `count_faults`
    reads the process's count of minor page faults, `read_load` the number of processes that want to run, and
    `read_waits` the seconds that the process's threads have waited for a processor, None if nothing says it: of this
    process and this machine, unless the clock belongs to another. `flush`, where given, empties the caches before
    every call. `on_block` is called before the first block and after each. `read_clock` reads the frequency at which
    the device computes; 0: nothing says it.
    """

    on_turn: Callable[[Arm], object] = lambda _: None
    count_faults: Callable[[], int] = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    read_load: Callable[[], float] = (lambda: os.getloadavg()[0]) if hasattr(os, "getloadavg") else lambda: 0.0
    read_waits: Callable[[], float | None] = own_waits_s
    flush: Callable[[], object] | None = None
    on_block: Callable[[], object] = lambda: None
    read_clock: Callable[[], float] = lambda: 0.0


SIMULATED = Conditions(count_faults=lambda: 0, read_load=lambda: 0.0, read_waits=lambda: None)
"""Where the clock is simulated, nothing is read of this machine."""


def choose(seconds: Mapping[Arm, float], least_s: float, *, is_cold: bool = False) -> Settings:
    """Choose the settings of a visit from the typical seconds of a call of each arm; samples last at least `least_s`.

    They depend on no arm alone, and are the same for all: identical code has identical settings, whatever was read.
    """
    own = [call_s for arm, call_s in seconds.items() if arm != PROBE]
    if not own:
        return Settings(num_calls=1, is_touched=False, is_warmed=True)
    quickest_s, slowest_s = min(own), max(own)
    num_calls = 1
    while num_calls * quickest_s < least_s and 2 * num_calls * slowest_s <= MOST_TIMES * least_s:
        num_calls *= 2
    return Settings(
        num_calls=min(num_calls, MOST_COLD_CALLS) if is_cold else num_calls,
        is_touched=quickest_s < TOUCH_BELOW_S and not is_cold,
        is_warmed=quickest_s < LONGEST_WARMED * WARM_S,
    )


def calibrate(
    calls: Sequence[TimedCall], clock: Clock, least_s: float, on_turn: Callable[[Arm], object] = lambda _: None
) -> dict[Arm, float]:
    """Find the typical seconds of a call of each arm: call all in rounds, which grow until they fill a sample.

    In each round every arm has the same number of calls. The median over the rounds counts, so that one late reading
    is not taken for a long call.
    """
    readings: dict[Arm, list[float]] = {timed.arm: [] for timed in calls}
    for number in count(1):
        num_calls = 2 ** max(0, number - FEWEST_ROUNDS)
        for timed in calls:
            on_turn(timed.arm)
            elapsed_s = clock.elapsed(timed.call, num_calls)
            timed.called_s += elapsed_s
            readings[timed.arm].append(elapsed_s / num_calls)
        seconds = {arm: median(own) for arm, own in readings.items()}
        is_enough = number >= FEWEST_ROUNDS or min(seconds.values(), default=math.inf) >= DECISIVE * least_s
        if is_enough and num_calls >= choose(seconds, least_s).num_calls:
            break
    return seconds


def num_blocks_each(arms: Sequence[Arm], costs_s: Sequence[float], at: Visit) -> list[int]:
    """In how many of the visit's first blocks each arm takes part: the longest in fewer, until they fit.

    Arms that have an A/A control, the control and the interference probe are in every block: the others are compared
    there. `costs_s` are the seconds of a sample.
    """
    controls = {arm for arm in arms if arm == arm.as_control()}
    is_shared = [arm == PROBE or arm.as_control() in controls for arm in arms]
    shares = [at.num_blocks] * len(arms)
    shared_s = sum(cost for cost, always in zip(costs_s, is_shared, strict=True) if always)
    while at.longest_s and sum(map(operator.mul, shares, costs_s)) > at.longest_s and max(shares) > 1:
        longest = max(
            (number for number in range(len(arms)) if not is_shared[number] and shares[number] > 1),
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
            if not timed.called_s:  # the first call in a process allocates and compiles
                conditions.on_turn(timed.arm)
                timed.called_s = clock.elapsed(timed.call, 1)
                timed.flags = int(clock.inspect(timed.call))
        measured = [timed for timed in calls if timed.arm != PROBE]
        least_s = SUSTAINED_SAMPLE_S if at.sustained_s else MIN_SAMPLE_S
        least_s = max(least_s, MIN_SAMPLE_TICKS * clock.resolution_s)
        seconds = {each.arm: each.call_s for each in at.known}
        if any(timed.arm not in seconds for timed in measured):
            seconds |= calibrate(measured, clock, least_s, conditions.on_turn)
        settings = choose(seconds, least_s, is_cold=conditions.flush is not None)
        nums = {timed.arm: NUM_PROBE_CALLS if timed.arm == PROBE else settings.num_calls for timed in calls}
        if at.sustained_s:
            heat(measured, clock, at.sustained_s, conditions, seconds)
        untimed = NO_CALLS
        if settings.is_warmed and at.num_blocks and not at.sustained_s:
            untimed = warm(measured, clock, settings.num_calls, conditions)
        num_touches = int(settings.is_touched)
        costs_s = [(nums[arm] + num_touches) * seconds[arm] if arm in seconds else PROBE_SAMPLE_S for arm in nums]
        shares = dict(zip(nums, num_blocks_each([*nums], costs_s, at), strict=True))
        conditions.on_block()
        for block in range(max(shares.values())):
            present = [timed for timed in calls if block < shares[timed.arm]]
            for slot, timed in enumerate(draws.sample(present, len(present))):
                conditions.on_turn(timed.arm)
                if settings.is_touched and timed.arm != PROBE:
                    untimed = untimed.extended(timed, clock, 1)
                taken = _sample(timed, nums[timed.arm], clock, at, (block, slot), conditions)
                samples[timed.arm].append(
                    msgspec.structs.replace(taken, num_untimed=untimed.num_calls, untimed_s=untimed.spent_s)
                )
                untimed = NO_CALLS
            conditions.on_block()
    finally:
        if was_enabled:
            gc.enable()
    return {arm: tuple(taken) for arm, taken in samples.items()}


def warm(measured: Sequence[TimedCall], clock: Clock, num_calls: int, conditions: Conditions) -> "Untimed":
    """Call the arms in turn, untimed, until WARM_S have passed."""
    start_s, untimed = clock.now(), NO_CALLS
    for timed in cycle(measured):
        if clock.now() - start_s >= WARM_S:
            break
        conditions.on_turn(timed.arm)
        untimed = untimed.extended(timed, clock, num_calls)
    return untimed


def heat(
    measured: Sequence[TimedCall], clock: Clock, least_s: float, conditions: Conditions, seconds: Mapping[Arm, float]
) -> None:
    """Call the arms in turn without a pause for `least_s`, and on until the device's clock has settled, or to a limit.

    All arms of a visit share what it does to the device: none is compared with another one that was cooler. `seconds`
    are those of a call of each.
    """
    start_s, read = clock.now(), list[tuple[float, float]]()
    while measured:
        for timed in measured:
            conditions.on_turn(timed.arm)
            before_s = clock.now()
            num_calls = max(1, int(ROUND_S / seconds[timed.arm]))
            for _ in repeat(None, num_calls):  # behind a block of the clock's the device would rest
                timed.call()
            clock.elapsed(timed.call, 1)  # which waits for all of them
            timed.called_s += clock.now() - before_s
        spent_s = clock.now() - start_s
        read.append((spent_s, conditions.read_clock()))
        late = [frequency for at_s, frequency in read if at_s >= spent_s / 2]
        is_steady = not any(late) or (len(late) > 1 and max(late) - min(late) <= STEADY * max(late))
        if spent_s >= LONGEST_HEAT * least_s or (spent_s >= least_s and is_steady):
            return


def _sample(  # noqa: PLR0913, PLR0917 - what a sample is made of
    timed: TimedCall, num_calls: int, clock: Clock, at: Visit, place: tuple[int, int], conditions: Conditions
) -> Sample:
    load, waits_s = conditions.read_load(), conditions.read_waits()
    start_s, faults = clock.now(), conditions.count_faults()
    reading = clock.read(timed.call, num_calls, conditions.flush)
    num_faults, waited = conditions.count_faults() - faults, Flag(0)
    if waits_s is not None:
        waited_s = (conditions.read_waits() or 0.0) - waits_s
        waited = Flag.waits_read | (Flag.waited if waited_s > WAITED * reading.elapsed_s else Flag(0))
    timed.called_s += reading.elapsed_s
    return Sample(
        value=reading.elapsed_s / num_calls,
        num_calls=num_calls,
        epoch=at.epoch,
        visit=at.number,
        block=place[0],
        slot=place[1],
        start_s=start_s,
        num_faults=num_faults,
        load=load,
        host_s=reading.host_s / num_calls,
        flags=int(reading.flags) | timed.flags | int(waited),
    )


def settle(limit_s: float = 0.05, step_s: float = 1e-3) -> None:
    """Wait until the threads of this process sleep: after work they spin for a while, on cores that others need."""
    for _ in range(int(limit_s / step_s)):
        before_s = time.process_time()
        time.sleep(step_s)
        if time.process_time() - before_s < SETTLED_SHARE * step_s:
            return
