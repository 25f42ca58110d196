"""Flag suspicious numbers of a run: load from other work, impossible times, and warnings by cell.

A time is `invalid` if arithmetic forbids it, and gets a warning if it is only unlikely. Judged on read from raw
samples, so that better rules apply to old runs. Reasons for these rules: docs/adr/0014.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from attnbench.devices import device
from attnbench.devices.nvml import SLOWING, reasons
from attnbench.statistics.intervals import Estimate, median
from attnbench.storage.events import Event, RunFinished, WorkerStarted
from attnbench.storage.records import (
    LATENCY,
    Ceilings,
    Counters,
    DeviceState,
    Flag,
    Key,
    Operators,
    Place,
    Record,
    Status,
)
from attnbench.storage.samples import Samples
from attnbench.storage.warned import Warn, Warned
from attnbench.units import plain, show, significant
from attnbench.workloads import counts
from attnbench.workloads.workload import Workload

SLACK = 2.0
"""Factor by which the machine may be faster during timing than while its ceilings were measured: clocks and neighbours
change. The spread of the ceiling widens it, and so does the load if there was more than one process for each core."""
READING = 1.5
"""Reading alone may be this much faster than a copy, which may fetch each line before it is written."""
SAME = 1.1
"""Two times within this factor are equal within noise."""
FAR_LONGER = 4
"""Least factor between two lengths whose times are compared."""
TELLING = 0.2
"""If the additional products of a longer workload need at least this share of its time, its time has to grow."""
FAR_FASTER = 2.0
"""A backward pass this many times faster than the forward pass is suspicious; if it includes one, it is impossible."""

Warnings = dict[Key, tuple[Warned, ...]]

FAULT_S = 0.25e-6
"""Least cost of a minor page fault."""
NOTED_FAULTS, LARGEST_FAULTS = 0.05, 0.9
"""Shares of the time spent on page faults: worth a note, and the largest credible estimate."""
MOST = 0.5
"""A flag in more than this share of the samples is a property of the call, not a passing disturbance."""
ELSEWHERE = (
    "its time is not known: it leaves work on another stream, on which the device is busy when the current one is done"
)
ON_A_QUEUE = {
    Flag.host_bound: Warn.host_bound.says("host-bound: the device is done before the host has issued the call"),
    Flag.host_near: Warn.host_near.says(
        "nearly host-bound: the device needs less than 5 times as long as the host needs to issue the call"
    ),
    Flag.not_hidden: Warn.device_waited.says("the device waited for the host while it was timed"),
    Flag.waits: Warn.host_waits.says(
        "the host waits for the device inside the call: it synchronises, or launches more than the queue holds"
    ),
}
APART, SHORTEST_S = 0.1, 20e-6
"""Largest relative difference between a time and the sum of its kernels; in shorter calls, gaps between kernels weigh
too much."""
FALL = 0.05
"""If a clock falls by more within a visit, it affects the times."""


@dataclass(frozen=True, kw_only=True)
class SystemLoad:
    """Shares of the time of all processors, and the least memory that was free at the start of a process."""

    stolen: float  # by the hypervisor
    others: float
    free_bytes: int


def system_load(history: Iterable[Event], timed: Collection[int]) -> SystemLoad | None:
    """The load during a run; None without counters, as on a simulated machine.

    Covers the time from the start of each worker to its end; the last worker of a killed run has no end and is left
    out. If `timed` names workers that timed something, by their places in `history`, only these count: load during
    checks does not affect any time.
    """
    spans: dict[int, tuple[Counters, Counters]] = {}
    start: Counters | None = None
    begun = 0
    for place, event in enumerate(history):
        if not isinstance(event, WorkerStarted | RunFinished):
            continue
        end = event.before if isinstance(event, WorkerStarted) else event.counters
        if start is not None and end is not None and start.began_s == end.began_s:
            spans[begun] = start, end
        start, begun = event.counters if isinstance(event, WorkerStarted) else None, place
    counted = [spans[number] for number in spans if number in timed] or [*spans.values()]
    total_s, idle_s, stolen_s, own_s = (
        sum(getattr(after, name) - getattr(before, name) for before, after in counted)
        for name in ("total_s", "idle_s", "stolen_s", "own_s")
    )
    if total_s <= 0:
        return None
    return SystemLoad(
        stolen=max(0.0, stolen_s) / total_s,
        others=max(0.0, total_s - stolen_s - idle_s - own_s) / total_s,
        free_bytes=min(before.free_bytes for before, _ in counted),
    )


def judged(
    records: Sequence[Record], ceilings: Mapping[tuple[str, Place], Ceilings], *, is_cold: bool
) -> tuple[tuple[Record, ...], Warnings]:
    """Mark impossible times `invalid` and remove their numbers; return the records and the warnings by cell.

    `ceilings` are by host and place.
    """
    alike: defaultdict[tuple[object, ...], dict[Workload, float]] = defaultdict(dict)
    for record in records:
        if samples := record.samples(LATENCY):
            alike[_family(record)][record.workload] = median(Samples.of(samples).value)
    kept, warnings = [], Warnings()
    for record in records:
        doubts: list[tuple[Warned, bool]] = []
        if _share(record, Flag.other_stream) > MOST:
            doubts = [(Warn.other_stream.says(ELSEWHERE), True)]
        elif record.workload in (times := alike[_family(record)]):
            here = ceilings.get((record.host, record.workload.place))
            doubts = list(_doubts(record.workload, times, here, is_cold=is_cold))
        proofs = [text for text, is_certain in doubts if is_certain]
        if proofs:
            invalid = {"status": Status.invalid, "message": proofs[0], "measurements": ()}
            kept.append(msgspec.structs.replace(record, **invalid))
            continue
        kept.append(record)
        if doubts:
            warnings[record.key] = tuple(text for text, _ in doubts)
    return tuple(kept), warnings


def _family(record: Record) -> tuple[object, ...]:
    """The arm of a cell and its axes, except direction and length."""
    lengths = ("direction", "seq_len", "kv_len")
    return record.arm, *(value for axis, value in record.workload.axes().items() if axis not in lengths)


def _share(record: Record, flag: Flag) -> float:
    samples = record.samples(LATENCY)
    return float(((Samples.of(samples).flags & flag) != 0).mean()) if samples else 0.0


def _limits(workload: Workload, time_s: float, ceilings: Ceilings, *, is_cold: bool) -> Iterator[tuple[Warned, bool]]:
    """Rates above a ceiling, and whether each is impossible: beyond any copy, even one inside a cache."""
    num_flops, num_bytes = counts.least_flops(workload), counts.least_bytes(workload)
    copy, any_copy = ceilings.copy(num_bytes, is_cold=is_cold), ceilings.copy(0)
    for what, like, unit, rate, ceiling, highest, slack in (
        ("matrix product", "", "flops/s", num_flops / time_s, ceilings.matmul, ceilings.matmul, 1.0),
        ("copy", " of as many bytes", "bytes/s", num_bytes / time_s, copy, any_copy, READING),
    ):
        if ceiling is None or highest is None or rate <= slack * ceiling.rate:
            continue
        is_certain = rate > SLACK * slack * highest.spread * max(1.0, ceilings.crowding) * highest.rate
        least = f"{show(time_s, 's')} a call is at least {show(rate, unit)}"
        if is_certain:
            above = f"{significant(rate / highest.rate, 3)} times the fastest {what} of this run"
            yield Warn.above_ceiling.says(f"impossible: {least}, {above} ({show(highest.rate, unit)})"), True
        else:
            above = f"{significant(rate / ceiling.rate, 3)} times the fastest {what}{like}"
            text = f"{least}, {above}: the machine was slower when that was measured, or the time is wrong"
            yield Warn.above_ceiling.says(text), False


def _doubts(
    workload: Workload, times: Mapping[Workload, float], ceilings: Ceilings | None, *, is_cold: bool
) -> Iterator[tuple[Warned, bool]]:
    """Suspicious features of a time, and whether each proves it wrong.

    `times` also holds those of other directions and lengths.
    """
    time_s = times[workload]
    if time_s <= 0:
        yield Warn.above_ceiling.says("impossible: no time passed"), True
        return
    if ceilings is not None:
        yield from _limits(workload, time_s, ceilings, is_cold=is_cold)
    lengths = workload.seq_len, workload.kv_len
    alike = {other.direction: other_s for other, other_s in times.items() if (other.seq_len, other.kv_len) == lengths}
    forward_s = alike.get("forward", alike.get("inference"))
    if workload.direction.endswith("backward") and forward_s is not None and FAR_FASTER * time_s < forward_s:
        text = f"its forward pass is {significant(forward_s / time_s, 2)}x slower"
        yield Warn.fast_backward.says(text), workload.direction == "forward_backward" and "forward" in alike
    if ceilings is None or ceilings.matmul is None:
        return
    work, least = time_s * ceilings.matmul.rate, counts.least_flops(workload)
    for other, other_s in times.items():
        is_far_longer = other.direction == workload.direction and workload.seq_len >= FAR_LONGER * other.seq_len
        if is_far_longer and least - counts.least_flops(other) > TELLING * work and time_s < SAME * other_s:
            text = f"takes no longer than at length {other.seq_len}: is all of it computed?"
            yield Warn.free_length.says(text), False
            return


def warnings_of(record: Record, time: Estimate | None, *, is_cold: bool = False) -> Iterator[Warned]:
    """All warnings about an ok cell."""
    if record.status is not Status.ok:
        return
    if record.message:
        yield Warn.checked_with_note.says(plain(record.message))
    latency = record.measurement(LATENCY)
    if time is None or latency is None:
        yield Warn.not_timed.says("agrees, not timed")
        return
    yield from (text for flag, text in ON_A_QUEUE.items() if _share(record, flag) > MOST)
    if record.operators is not None:
        is_bound = _share(record, Flag.host_bound | Flag.host_near) > MOST
        yield from _kernels(record.operators, time.point, may_take_longer=is_cold or is_bound)
    yield from _faults(record, Samples.of(latency.samples), time)
    with suppress(ValueError):  # the run may name a device that is not installed here
        notes = device(record.workload.device).notes(record.workload, record.environment)
        yield from map(Warn.device_precision.says, notes)
    if record.operators is not None and record.operators.copies:
        yield Warn.copies.says(plain(f"its time includes copies: {record.operators.copies}"))
    for measurement in record.measurements:
        yield from (Warn.measured_with_note.says(plain(text)) for text in measurement.warnings)


def _kernels(seen: Operators, time_s: float, *, may_take_longer: bool) -> Iterator[Warned]:
    """Disagreements between the clock and the profiled kernels of a call, and kernels on other streams."""
    if seen.elsewhere:
        yield Warn.other_stream.says(plain(f"kernels on another stream: {', '.join(seen.elsewhere)}"))
    kernel_s = seen.kernel_s
    is_longer = time_s > (1 + APART) * kernel_s
    if not kernel_s or max(time_s, kernel_s) < SHORTEST_S or (is_longer and may_take_longer):
        return
    if is_longer:
        rest = f"{_percent(1 - kernel_s / time_s)} of its time are pauses between them, or the profiler missed some"
        yield Warn.kernels_shorter.says(f"its kernels take {show(kernel_s, 's')} by the profiler: {rest}")
    elif kernel_s > (1 + APART) * time_s:
        text = f"its kernels take {show(kernel_s, 's')} by the profiler, more than its time: is all of it timed?"
        yield Warn.kernels_longer.says(text)


def throttled_by(visits: Iterable[Sequence[DeviceState]]) -> int:
    """All reasons that slowed the device, as the bits of CLOCK_EVENTS in devices/nvml.py; 0 for none."""
    return _union(state for visit in visits for state in visit) & SLOWING


def slowed(visits: Iterable[Sequence[DeviceState]]) -> Iterator[Warned]:
    """Reasons to distrust times from the device states of a workload's visits; ratios are less affected."""
    visits = list(visits)
    falls = [_fall(visit) for visit in visits]
    if falls and (typical := median(falls)) > FALL:
        fallen = [state for visit, fall in zip(visits, falls, strict=True) if fall > FALL for state in visit]
        why = reasons(_union(fallen)) or "the driver gives no reason"
        yield Warn.clock_fell.says(f"the clock fell {_percent(typical)} within the visit: {why}")
        return
    states = [state for visit in visits for state in visit]
    held = [state for state in states if reasons(state.slowed_by)]
    if len(held) > MOST * len(states):
        clock_mhz = median([state.clock_mhz for state in held])
        yield Warn.clock_held.says(f"the clock was held at {clock_mhz:,.0f} MHz: {reasons(_union(held))}")


def _fall(visit: Sequence[DeviceState]) -> float:
    """The largest fall of the clock within a visit, as a share of the highest clock before it."""
    clocks = np.array([state.clock_mhz for state in visit if state.clock_mhz > 0])
    return float((1 - clocks / np.maximum.accumulate(clocks)).max(initial=0.0))


def _union(states: Iterable[DeviceState]) -> int:
    return functools.reduce(operator.or_, (state.slowed_by for state in states), 0)


def _faults(record: Record, samples: Samples, time: Estimate) -> Iterator[Warned]:
    """Describe the page faults of a call and their estimated share of its time."""
    num_faults = median(samples.num_faults / np.maximum(1, samples.num_calls))
    share = min(num_faults * FAULT_S / time.point, LARGEST_FAULTS)
    if share <= NOTED_FAULTS:
        return
    retains = record.environment is not None and "MALLOC_MMAP_MAX_" in record.environment.settings
    hint = "" if retains else ": --conditions retain"
    yield Warn.page_faults.says(f"{num_faults:,.0f} page faults a call (about {_percent(share)} of the time){hint}")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
