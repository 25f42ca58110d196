"""Flag suspicious numbers of a run: load from other work, impossible times, and warnings by cell.

A cell is `invalid` if its time must be wrong, and gets a warning if its time is only unlikely. The rules are applied to
raw samples when a run is read, so that better rules apply to old runs, too. Reasons for these rules: docs/adr/0014.
"""

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from attnbench.analysis.warned import Warn, Warned
from attnbench.devices import device
from attnbench.devices.nvml import SLOWING, reasons
from attnbench.statistics.intervals import Estimate, median
from attnbench.storage.events import RunFinished, WorkerStarted
from attnbench.storage.records import LATENCY, Ceilings, Counters, DeviceState, Flag, HardwareKey, Key, Record, Status
from attnbench.storage.samples import Samples
from attnbench.units import percent, sanitize_line, show, significant
from attnbench.workloads import counts

SLACK = 2.0
"""Factor by which the machine may be faster during timing than during the measurement of its ceilings (the fastest
matrix product and copy), since clocks and other load change. It is multiplied by the spread of the ceiling and, if the
load exceeded one process per core, by this load."""
READING = 1.5
"""Factor by which reading may be faster than copying, since a copy may also read each cache line that it writes."""
Warnings = dict[Key, tuple[Warned, ...]]

FAULT_S = 0.25e-6  # least seconds that a minor page fault takes
NOTED_FAULTS, LARGEST_FAULTS = 0.05, 0.9
"""NOTED_FAULTS: share of a call's time spent on page faults above which there is a warning. LARGEST_FAULTS: upper limit
of the estimate of this share."""
MOST = 0.5
"""A flag in more than this share of the samples is a property of the call, and not a passing disturbance."""
ON_A_QUEUE = {
    Flag.host_bound: Warn.host_bound.says("host-bound: the device is done before the host has issued the call"),
    Flag.host_near: Warn.host_near.says(
        "nearly host-bound: the call takes less than 5 times as long on the device as the host takes to issue it"
    ),
    Flag.not_hidden: Warn.device_waited.says("the device waited for the host while it was timed"),
    Flag.waits: Warn.host_waits.says(
        "the host waits for the device inside the call: it synchronises, or launches more than the queue holds"
    ),
}
"""Warnings by the flag that most samples of a cell have, on devices that execute calls from a queue."""
APART, SHORTEST_S = 0.1, 20e-6
"""APART: there is a warning if a call's kernel time exceeds the time of the call by a larger share than this.
SHORTEST_S: kernel times below this, in seconds, are not judged."""
FALL = 0.05  # there is a warning if the clock falls by more than this share within a visit (a series of timed blocks)


@dataclass(frozen=True, kw_only=True)
class SystemLoad:
    """Shares of the processors' time that other work took, and the least free memory at the start of a process."""

    stolen: float  # share used by the hypervisor: 0.05 is 5 %
    others: float  # share used by other processes
    free_bytes: int


def system_load(history: Iterable[WorkerStarted | RunFinished], timed: Collection[int]) -> SystemLoad | None:
    """Compute the load from other work during a run; None without counters, as on a simulated machine.

    The load is counted from the start of each worker process to its end. The last worker of a killed run has no end and
    is left out. `timed` has the indices in `history` of workers that timed something. If there are any, only these
    workers count, because load during checks does not affect any time.
    """
    spans: dict[int, tuple[Counters, Counters]] = {}
    start: Counters | None = None
    begun = 0
    for place, event in enumerate(history):
        end = event.before if isinstance(event, WorkerStarted) else event.counters
        if start is not None and end is not None and start.began_s == end.began_s:
            spans[begun] = start, end
        start, begun = event.counters if isinstance(event, WorkerStarted) else None, place
    counted = [spans[number] for number in spans if number in timed] or [*spans.values()]

    def passed(name: str) -> float:
        return float(sum(getattr(after, name) - getattr(before, name) for before, after in counted))

    total_s, idle_s, stolen_s, own_s = map(passed, ("total_s", "idle_s", "stolen_s", "own_s"))
    if total_s <= 0:
        return None
    return SystemLoad(
        stolen=max(0.0, stolen_s) / total_s,
        others=max(0.0, total_s - stolen_s - idle_s - own_s) / total_s,
        free_bytes=min(before.free_bytes for before, _ in counted),
    )


def flag_impossible_times(
    records: Sequence[Record],
    ceilings: Mapping[tuple[str, HardwareKey], Ceilings],
    slow: Mapping[str, tuple[Warned, ...]] | None = None,
    *,
    is_cold: bool,
) -> tuple[tuple[Record, ...], Warnings]:
    """Mark cells with impossible times `invalid`, and remove their numbers; return the records, and warnings by cell.

    `ceilings` are keyed by host name and hardware. `slow` has the warnings of `slowdown_warnings`, by workload id.
    `is_cold` is true if caches did not hold the data of a call when it began.
    """
    kept, warnings = [], Warnings()
    for record in records:
        doubts = list(_doubts(record, ceilings.get((record.host, record.workload.place)), is_cold=is_cold))
        proofs = [text for text, is_certain in doubts if is_certain]
        if proofs:
            invalid = {"status": Status.invalid, "message": proofs[0], "measurements": ()}
            kept.append(msgspec.structs.replace(record, **invalid))
            continue
        kept.append(record)
        falls = () if record.measurement(LATENCY) is None else (slow or {}).get(record.workload.id, ())
        if texts := (*(text for text, _ in doubts), *falls):
            warnings[record.key] = texts
    return tuple(kept), warnings


def _share(record: Record, flag: Flag) -> float:
    samples = record.samples(LATENCY)
    return float(((Samples.of(samples).flags & flag) != 0).mean()) if samples else 0.0


def _doubts(record: Record, ceilings: Ceilings | None, *, is_cold: bool) -> Iterator[tuple[Warned, bool]]:
    """Yield (warning, is_certain) for work on other streams and excessive rates; if certain, the time must be wrong."""
    workload = record.workload
    if _share(record, Flag.other_stream) > MOST:
        text = "it leaves work on another stream, which is still running when the current stream is done"
        yield Warn.other_stream.says(f"its time is not known: {text}"), True
        return
    if not (samples := record.samples(LATENCY)):
        return
    if (time_s := median(Samples.of(samples).value)) <= 0:
        yield Warn.above_ceiling.says("impossible: no time passed"), True
        return
    if ceilings is None:
        return
    num_flops, num_bytes = counts.least_flops(workload), counts.least_bytes(workload)
    copy, any_copy = ceilings.copy(num_bytes, is_cold=is_cold), ceilings.copy(0)
    for what, like, unit, rate, ceiling, highest, slack in (
        ("matrix product", "", "flops/s", num_flops / time_s, ceilings.matmul, ceilings.matmul, 1.0),
        ("copy", " of as many bytes", "bytes/s", num_bytes / time_s, copy, any_copy, READING),
    ):
        if ceiling is None or highest is None or rate <= slack * ceiling.rate:
            continue
        is_certain = rate > SLACK * slack * highest.spread * max(1.0, ceilings.crowding) * highest.rate
        fastest, kind = (highest, what) if is_certain else (ceiling, f"{what}{like}")
        above = f"{significant(rate / fastest.rate, 3)} times the fastest {kind} of this run"
        text = f"{show(time_s, 's')} a call is at least {show(rate, unit)}, {above} ({show(fastest.rate, unit)})"
        yield Warn.above_ceiling.says(f"impossible: {text}" if is_certain else text), is_certain


def warnings_of(record: Record, time: Estimate | None) -> Iterator[Warned]:
    """Yield warnings about a cell with the estimated `time` (None: not timed); nothing unless its status is ok."""
    if record.status is not Status.ok:
        return
    if record.message:
        yield Warn.checked_with_note.says(sanitize_line(record.message))
    latency = record.measurement(LATENCY)
    if time is None or latency is None:
        yield Warn.not_timed.says("agrees, not timed")
        return
    yield from (text for flag, text in ON_A_QUEUE.items() if _share(record, flag) > MOST)
    seen = record.operators
    if seen is not None and seen.kernel_s >= SHORTEST_S and seen.kernel_s > (1 + APART) * time.point:
        text = f"its kernels take {show(seen.kernel_s, 's')} by the profiler, more than its time: part may be untimed"
        yield Warn.kernels_longer.says(text)
    yield from _faults(record, Samples.of(latency.samples), time)
    native, dtype = None if record.environment is None else record.environment.native_dtypes, record.workload.dtype
    with suppress(ValueError):  # the run may name a device that is not installed here
        is_slow = native is not None and dtype in {"bfloat16", "float16"} - {*native}
        if is_slow and device(record.workload.device).is_host:
            yield Warn.device_precision.says(f"this processor has no {dtype} arithmetic and may run slow fallback code")
    if seen is not None and seen.copies:
        yield Warn.copies.says(sanitize_line(f"its time includes copies: {seen.copies}"))
    for measurement in record.measurements:
        yield from (Warn.measured_with_note.says(sanitize_line(text)) for text in measurement.warnings)


def throttled_by(visits: Iterable[Sequence[DeviceState]]) -> int:
    """Return all reasons that slowed the device, as bits of CLOCK_EVENTS in devices/nvml.py; 0 for none."""
    return _union(state for visit in visits for state in visit) & SLOWING


def slowdown_warnings(visits: Iterable[Sequence[DeviceState]]) -> Iterator[Warned]:
    """Yield a warning if the device's clock fell by more than FALL within a visit (median over a workload's visits).

    A visit is a short series of timed blocks. A falling clock affects times more than ratios of times.
    """
    visits = list(visits)
    falls = [_fall(visit) for visit in visits]
    if falls and (typical := median(falls)) > FALL:
        fallen = [state for visit, fall in zip(visits, falls, strict=True) if fall > FALL for state in visit]
        why = reasons(_union(fallen)) or "the driver gives no reason"
        yield Warn.clock_fell.says(f"the clock fell {percent(typical)} within the visit: {why}")


def _fall(visit: Sequence[DeviceState]) -> float:
    """Return the largest fall of the clock within a visit, as a share of the highest clock before it."""
    clocks = np.array([state.clock_mhz for state in visit if state.clock_mhz > 0])
    return float((1 - clocks / np.maximum.accumulate(clocks)).max(initial=0.0))


def _union(states: Iterable[DeviceState]) -> int:
    return functools.reduce(operator.or_, (state.slowed_by for state in states), 0)


def _faults(record: Record, samples: Samples, time: Estimate) -> Iterator[Warned]:
    """Yield a warning about page faults if their estimated share of a call's time exceeds NOTED_FAULTS."""
    num_faults = median(samples.num_faults / np.maximum(1, samples.num_calls))
    share = min(num_faults * FAULT_S / time.point, LARGEST_FAULTS)
    if share <= NOTED_FAULTS:
        return
    retains = record.environment is not None and "MALLOC_MMAP_MAX_" in record.environment.settings
    hint = "" if retains else ": try --conditions retain"
    yield Warn.page_faults.says(f"{num_faults:,.0f} page faults a call (about {percent(share)} of the time){hint}")
