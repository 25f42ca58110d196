"""Sample in randomised complete blocks (R. A. Fisher, The Design of Experiments, 1935), on any clock, without torch.

An arm is an implementation that takes part. A block samples each arm once, in a new random order. Verdicts use the
ratio of the times of two arms in the same block, which drift of the machine hardly affects. In a visit (a few blocks of
one workload), the samples of all arms have the same number of calls, and the same number of untimed calls before them.
If the numbers differed, one slow reading of an arm could make identical code look different in all later samples.
"""

import math
import os
import random
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle, repeat
from statistics import median

import msgspec

from attnbench.devices import Clock
from attnbench.devices.waiting import Waits, longest_wait_s, waits
from attnbench.storage.records import PROBE, Arm, Flag, Sample

BlockSlot = tuple[int, int]  # number of a block, and position in it
Known = tuple[Arm, float]  # an arm, and the typical seconds of its call
MIN_SAMPLE_TICKS = 1000  # shortest sample, in multiples of the clock's resolution
SUSTAINED_SAMPLE_S = 20e-3
"""Shortest sample of a sustained visit: much longer than the half millisecond in which a device cools between two
samples."""
NUM_PROBE_CALLS, PROBE_SAMPLE_S = 4, 0.3e-3
"""Calls and approximate seconds of a sample of the interference probe: long enough for other work to delay it, and
short compared with the samples of arms."""
TOUCH_BELOW_S = 10e-3
"""If a call of the quickest arm is shorter than this and caches are warm, an untimed call precedes each sample, because
the previous arm has evicted the data. The next calls are a few percent slower, too, but hardly change their median.
Longer calls warm the caches themselves, and an extra call would double their cost."""
WARM_S = 20e-3
"""Seconds of untimed calls before the first sample: calls after a pause are slower ("After a pause" in
docs/method.md)."""
WARM_STEPS = 4  # approximate number of turns (of one arm each) in WARM_S; more if samples are shorter
LONGEST_WARMED_S = 25 * WARM_S  # if the quickest call is longer, nothing is warmed: a pause changes it by 2 % at most
FEWEST_ROUNDS, DECISIVE = 3, 10
"""Fewest rounds of a calibration, since one reading may be late; one round is enough if every call lasts at least
DECISIVE shortest samples."""
MOST_TIMES = 10
"""Longest sample of the slowest arm if it has several calls, as a multiple of the shortest sample. If one arm is far
slower than the others, this limit reduces the calls of all arms."""
MOST_COLD_CALLS = 8  # in a sample with cold caches, since twice the largest cache is written before each call
LONGEST_HEAT, STEADY = 4, 0.02
"""Heating lasts at least the requested seconds. It ends once the clock frequency of the device has varied by at most
the share STEADY in the second half of the time, and at the latest after LONGEST_HEAT times the requested seconds."""
ROUND_S = 0.05  # seconds for which each arm is called between two readings of the device's clock frequency
MOST_READ = 64  # latest samples of an arm that define its typical time
WAITED = 0.1
"""A sample counts as disturbed if one of its threads has waited for a processor for a larger share of the time. On an
idle machine, one sample in twenty reaches half of this share."""


@dataclass(kw_only=True)
class TimedCall:
    """The call of an arm (an implementation that takes part), with its state in this process."""

    arm: Arm
    call: Callable[[], object]
    called_s: float = 0.0  # seconds inside all calls up to now, untimed ones included; 0: not called yet
    flags: int = 0  # bits of `Flag` (storage/records.py) for all its samples, found at the first call

    def spend(self, clock: Clock, num_calls: int = 1) -> float:
        """Make calls that give no sample; return their seconds."""
        elapsed_s = clock.elapsed(self.call, num_calls)
        self.called_s += elapsed_s
        return elapsed_s


def known(samples: Mapping[Arm, Sequence[Sample]]) -> tuple[Known, ...]:
    """Return pairs of an arm (implementation) and the typical seconds of its call, from its latest MOST_READ samples.

    The typical time is the median. The interference probe and arms without samples are left out.
    """

    def typical_s(latest: Sequence[Sample]) -> float:
        return median(sample.value for sample in latest)

    return tuple((arm, typical_s(own[-MOST_READ:])) for arm, own in samples.items() if own and arm != PROBE)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the samples of a visit (a few blocks of one workload), the same for all arms (implementations).

    Only the interference probe, a fixed task that is slower while other work runs, has a number of calls of its own.
    """

    num_calls: int  # in each sample
    num_touches: int  # untimed calls before each sample
    is_warmed: bool  # the process computes for WARM_S before the first sample


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of visit `number` of a workload: a few blocks in the process with the number `epoch`.

    `seed` sets the order of the arms in each block. If the blocks would last longer than `longest_s` seconds (0: no
    limit), slow arms take part in fewer of them; if this is not enough, there are fewer blocks, but at least one. The
    arms in `references` take part in every block, since other arms are compared with them. Before the first block, the
    arms are called for at least `sustained_s` seconds without a pause. Samples last at least `sample_s` seconds (0: as
    long as the clock requires). The number of calls in a sample is chosen from the call times in `known`, which may
    include arms of other processes, so that all processes choose the same. If `known` lacks an arm of this process, all
    its arms are calibrated.
    """

    epoch: int
    number: int
    num_blocks: int
    seed: int
    longest_s: float = 0.0
    references: tuple[Arm, ...] = ()
    sustained_s: float = 0.0
    sample_s: float = 0.0
    known: tuple[Known, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Functions that are called around every sample; by default they read this process and machine.

    `on_turn` is called with each arm before its calls, so that a crash is attributed to the right one. `on_block` is
    called before the first block and after each block. `flush` empties the caches before every timed call (None: they
    stay warm). `count_faults` reads the minor page faults of the process, and `read_load` the machine's one-minute load
    average. `read_waits` reads the seconds for which each thread has waited for a processor (empty: unknown), and
    `read_clock` the frequency of the device in MHz (0: unknown).
    """

    on_turn: Callable[[Arm], object] = lambda _: None
    count_faults: Callable[[], int] = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    read_load: Callable[[], float] = (lambda: os.getloadavg()[0]) if hasattr(os, "getloadavg") else lambda: 0.0
    read_waits: Callable[[], Waits] = waits
    flush: Callable[[], object] | None = None
    on_block: Callable[[], object] = lambda: None
    read_clock: Callable[[], float] = lambda: 0.0


# For simulated clocks: nothing of this machine is read.
SIMULATED = Conditions(count_faults=lambda: 0, read_load=lambda: 0.0, read_waits=dict)


def choose(seconds: Mapping[Arm, float], least_s: float, *, is_cold: bool = False) -> Settings:
    """Choose the settings of a visit (a few blocks of one workload) from the typical seconds of a call of each arm.

    Samples last at least `least_s` seconds, unless one arm is far slower (MOST_TIMES) or the caches are cold
    (`is_cold`). All arms get the same settings, so that identical code is sampled identically, whatever the readings.
    """
    own = [call_s for arm, call_s in seconds.items() if arm != PROBE]
    quickest_s, slowest_s = min(own, default=math.inf), max(own, default=math.inf)
    num_calls = 1
    while num_calls * quickest_s < least_s and 2 * num_calls * slowest_s <= MOST_TIMES * least_s:
        num_calls *= 2
    return Settings(
        num_calls=min(num_calls, MOST_COLD_CALLS) if is_cold else num_calls,
        num_touches=int(quickest_s < TOUCH_BELOW_S and not is_cold),
        is_warmed=quickest_s < LONGEST_WARMED_S,
    )


def calibrate(
    calls: Sequence[TimedCall], clock: Clock, least_s: float, on_turn: Callable[[Arm], object] = lambda _: None
) -> dict[Arm, float]:
    """Measure the typical seconds of a call of each arm in rounds; their number of calls grows up to that of a sample.

    In a round, all arms make the same number of calls. The result is the median over rounds, so that one late reading
    does not make a call look slow. `least_s` is the shortest sample in seconds. `on_turn` is called with each arm
    before its calls.
    """
    readings: dict[Arm, list[float]] = {timed.arm: [] for timed in calls}
    for number in count(1):
        num_calls = 2 ** max(0, number - FEWEST_ROUNDS)
        for timed in calls:
            on_turn(timed.arm)
            readings[timed.arm].append(timed.spend(clock, num_calls) / num_calls)
        seconds = {arm: median(own) for arm, own in readings.items()}
        is_enough = number >= FEWEST_ROUNDS or min(seconds.values(), default=math.inf) >= DECISIVE * least_s
        if is_enough and num_calls >= choose(seconds, least_s).num_calls:
            break
    return seconds


def num_blocks_each(costs_s: Mapping[Arm, float], at: Visit) -> dict[Arm, int]:
    """Choose the number of blocks of each arm, so that all samples fit into `at.longest_s` seconds.

    `costs_s` has the seconds of a sample of each arm. Slow arms get fewer blocks. The arms in `at.references` and the
    interference probe are in every block; if their samples take most of the time, there are fewer blocks, but at least
    one.
    """
    shared = {arm for arm in costs_s if arm == PROBE or arm in at.references}
    blocks, shared_s = dict.fromkeys(costs_s, at.num_blocks), sum(costs_s[arm] for arm in shared)
    while at.longest_s and sum(blocks[arm] * costs_s[arm] for arm in blocks) > at.longest_s:
        most = max(blocks.values())
        if most == 1:
            break
        others = [arm for arm in blocks if arm not in shared and blocks[arm] > 1]
        longest = max(others, key=lambda arm: blocks[arm] * costs_s[arm], default=PROBE)
        if others and blocks[longest] * costs_s[longest] >= most * shared_s:
            blocks[longest] -= 1
        else:
            blocks = {arm: min(number, most - 1) for arm, number in blocks.items()}
    return blocks


def visit(
    calls: Sequence[TimedCall], clock: Clock, at: Visit, conditions: Conditions = SIMULATED
) -> dict[Arm, tuple[Sample, ...]]:
    """Time a visit, a few blocks of one workload, as `at` plans it; return the samples of each arm in time order."""
    draws = random.Random(at.seed)
    samples: dict[Arm, list[Sample]] = {timed.arm: [] for timed in calls}
    for timed in calls:
        if not timed.called_s:  # the first call in a process allocates and compiles
            conditions.on_turn(timed.arm)
            timed.spend(clock)
            timed.flags = int(clock.inspect(timed.call))
    measured = [timed for timed in calls if timed.arm != PROBE]
    paced_s = SUSTAINED_SAMPLE_S if at.sustained_s else clock.sample_s
    least_s = max(paced_s, at.sample_s, MIN_SAMPLE_TICKS * clock.resolution_s)
    seconds = dict(at.known)
    if any(timed.arm not in seconds for timed in measured):
        seconds |= calibrate(measured, clock, least_s, conditions.on_turn)
    settings = choose(seconds, least_s, is_cold=conditions.flush is not None)
    nums = {timed.arm: NUM_PROBE_CALLS if timed.arm == PROBE else settings.num_calls for timed in calls}
    if at.sustained_s:
        heat(measured, clock, at.sustained_s, conditions, seconds)
    if settings.is_warmed and at.num_blocks and not at.sustained_s:
        warm(measured, clock, max(1, int(settings.num_calls * min(1.0, WARM_S / (WARM_STEPS * least_s)))), conditions)
    in_turn = settings.num_calls + settings.num_touches
    costs_s = {arm: in_turn * seconds[arm] if arm in seconds else PROBE_SAMPLE_S for arm in nums}
    shares = num_blocks_each(costs_s, at)
    conditions.on_block()
    for block in range(max(shares.values())):
        present = [timed for timed in calls if block < shares[timed.arm]]
        for slot, timed in enumerate(draws.sample(present, len(present))):
            conditions.on_turn(timed.arm)
            before = conditions.read_waits()  # before the untimed calls: it takes long, and threads fall asleep
            if settings.num_touches and timed.arm != PROBE:
                timed.spend(clock, settings.num_touches)
            taken = _sample(timed, nums[timed.arm], clock, at, (block, slot), conditions, before)
            samples[timed.arm].append(taken)
        conditions.on_block()
    return {arm: tuple(taken) for arm, taken in samples.items()}


def warm(measured: Sequence[TimedCall], clock: Clock, num_calls: int, conditions: Conditions) -> None:
    """Call the arms in turn, `num_calls` times each, until WARM_S seconds have passed. These calls are not timed."""
    start_s = clock.now()
    for timed in cycle(measured):
        if clock.now() - start_s >= WARM_S:
            break
        conditions.on_turn(timed.arm)
        timed.spend(clock, num_calls)


def heat(
    measured: Sequence[TimedCall], clock: Clock, least_s: float, conditions: Conditions, seconds: Mapping[Arm, float]
) -> None:
    """Call the arms in turn without a pause, for at least `least_s` seconds and until the clock frequency is steady.

    Heating ends after LONGEST_HEAT times `least_s` seconds in any case. It makes the device equally hot for all arms.
    `seconds` has the seconds of a call of each arm.
    """
    start_s, read = clock.now(), list[tuple[float, float]]()
    while measured:
        for timed in measured:
            conditions.on_turn(timed.arm)
            before_s = clock.now()
            num_calls = max(1, int(ROUND_S / seconds[timed.arm]))
            for _ in repeat(None, num_calls):  # not by the clock, which lets the device rest before the calls
                timed.call()
            clock.elapsed(timed.call, 1)  # waits for all of them
            timed.called_s += clock.now() - before_s
        spent_s = clock.now() - start_s
        read.append((spent_s, conditions.read_clock()))
        late = [frequency for at_s, frequency in read if at_s >= spent_s / 2]
        is_steady = not any(late) or (len(late) > 1 and max(late) - min(late) <= STEADY * max(late))
        if spent_s >= LONGEST_HEAT * least_s or (spent_s >= least_s and is_steady):
            return


def _sample(  # noqa: PLR0913, PLR0917 - the parts of a sample
    timed: TimedCall, number: int, clock: Clock, at: Visit, place: BlockSlot, conditions: Conditions, before: Waits
) -> Sample:
    load, start_s, faults = conditions.read_load(), clock.now(), conditions.count_faults()
    reading = clock.read(timed.call, number, conditions.flush)
    num_faults, waited = conditions.count_faults() - faults, Flag(0)
    if before:
        waited_s = longest_wait_s(before, conditions.read_waits())
        waited = Flag.waits_read | (Flag.waited if waited_s > WAITED * reading.elapsed_s else Flag(0))
    timed.called_s += reading.elapsed_s
    return Sample(
        value=reading.call_s or reading.elapsed_s / number,
        num_calls=number,
        epoch=at.epoch,
        visit=at.number,
        block=place[0],
        slot=place[1],
        start_s=start_s,
        num_faults=num_faults,
        load=load,
        host_s=reading.host_s / number,
        flags=int(reading.flags) | timed.flags | int(waited),
    )
