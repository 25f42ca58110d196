"""Times that cannot be: `invalid` where arithmetic forbids them, a warning in words where they are only unlikely.

Judged on read, from raw samples, so that old runs are judged by better rules. Why these rules: docs/adr/0014.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from attnbench.statistics.intervals import median
from attnbench.storage.records import Arm, Ceilings, Key, Place, Record, Status
from attnbench.units import show, significant
from attnbench.workloads import counts
from attnbench.workloads.workload import Workload

SLACK = 2.0
"""How many times faster the machine may have been while it was timed than while its ceilings were taken: clocks and
neighbours come and go. It is widened by the ceiling's own spread, and by the load where there was more than one process
for each core."""
READING = 1.5
"""Reading alone may be so much faster than a copy, where each line that is written is fetched first."""
SAME = 1.1
"""Two times less than this apart are the same within noise."""
FAR_LONGER = 4
TELLING = 0.2
"""Where products that a longer workload adds must take this share of its time at least, its time has to show them."""
FAR_FASTER = 2.0
"""A backward pass that is so many times faster than the forward pass is strange; with one inside it, impossible."""

Cell = tuple[Workload, Arm]
Warnings = dict[Key, tuple[str, ...]]


def judged(
    records: Sequence[Record], ceilings: Mapping[Place, Ceilings], *, is_cold: bool
) -> tuple[tuple[Record, ...], Warnings]:
    """The records, what is impossible made `invalid` and without its numbers; and warnings by cell."""
    times = {(record.workload, record.arm): _time(record) for record in records}
    known = {cell: time_s for cell, time_s in times.items() if time_s is not None}
    by_arm: dict[Arm, dict[Cell, float]] = {}
    for cell, time_s in known.items():
        by_arm.setdefault(cell[1], {})[cell] = time_s
    found: list[Record] = []
    warnings: Warnings = {}
    for record in records:
        cell = record.workload, record.arm
        if cell not in known:
            found.append(record)
            continue
        here = ceilings.get(record.workload.place)
        own = by_arm[record.arm]
        limits = list(_limits(record.workload, known[cell], here, is_cold=is_cold))
        reasons = [limit for limit, is_certain in limits if is_certain] + list(_contradictions(cell, own))
        if reasons:
            found.append(msgspec.structs.replace(record, status=Status.invalid, message=reasons[0], measurements=()))
            continue
        found.append(record)
        strange = [limit for limit, _ in limits] + list(_oddities(cell, own, here))
        if strange:
            warnings[record.key] = tuple(strange)
    return tuple(found), warnings


def _time(record: Record) -> float | None:
    latency = record.measurement("latency")
    return median(s.value for s in latency.samples) if latency is not None and latency.samples else None


def _limits(
    workload: Workload, time_s: float, ceilings: Ceilings | None, *, is_cold: bool
) -> Iterator[tuple[str, bool]]:
    """What is above a ceiling, and whether that is certain: beyond any copy, even one that stays in a cache."""
    if time_s <= 0:
        yield "impossible: no time passed", True
    if ceilings is None or time_s <= 0:
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
        least = f"{show(time_s, 's')} a call is at least {show(rate, unit)}"
        if is_certain:
            above = f"{significant(rate / highest.rate, 3)} times the fastest {what} of this run"
            yield f"impossible: {least}, {above} ({show(highest.rate, unit)})", True
        else:
            above = f"{significant(rate / ceiling.rate, 3)} times the fastest {what}{like}"
            yield f"{least}, {above}: the machine was slower when that was measured, or the time is wrong", False


def _contradictions(cell: Cell, times: Mapping[Cell, float]) -> Iterator[str]:
    """A forward and backward pass that is far faster than its forward pass alone."""
    forward_s = times.get(_turned(cell, "forward"))
    if cell[0].direction == "forward_backward" and forward_s is not None and FAR_FASTER * times[cell] < forward_s:
        yield f"impossible: {show(times[cell], 's')} with the backward pass, {show(forward_s, 's')} without it"


def _oddities(cell: Cell, times: Mapping[Cell, float], ceilings: Ceilings | None) -> Iterator[str]:
    """What makes one wonder."""
    workload, time_s = cell[0], times[cell]
    forward_s = times.get(_turned(cell, "forward")) or times.get(_turned(cell, "inference"))
    if workload.direction.endswith("backward") and forward_s is not None and FAR_FASTER * time_s < forward_s:
        yield f"its forward pass takes {significant(forward_s / time_s, 2)} times as long"
    if ceilings is None or ceilings.matmul is None:
        return
    work = time_s * ceilings.matmul.rate
    least = counts.least_flops(workload)
    if least <= work < counts.useful_flops(workload):
        yield "above the matmul ceiling only by the usual count of a backward pass, which makes the scores again"
    for other, other_s in times.items():
        if (
            _is_far_longer(cell, other)
            and least - counts.least_flops(other[0]) > TELLING * work
            and time_s < SAME * other_s
        ):
            yield f"takes no longer than at length {other[0].seq_len}: is all of it computed?"
            return


def _turned(cell: Cell, direction: str) -> Cell:
    return msgspec.structs.replace(cell[0], direction=direction), cell[1]


def _is_far_longer(cell: Cell, other: Cell) -> bool:
    """Whether `other` is the same at a quarter of the length or less."""
    workload, shorter = cell[0], other[0]
    if cell[1] != other[1] or workload.seq_len < FAR_LONGER * shorter.seq_len or workload.mask != shorter.mask:
        return False
    return msgspec.structs.replace(workload, seq_len=shorter.seq_len, kv_len=shorter.kv_len) == shorter
