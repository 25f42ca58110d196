"""Why a cell takes longer than the fastest of its workload, in words for the table."""

from collections.abc import Iterable
from dataclasses import dataclass

from harness.breakdown import Timed, reasons, timed
from harness.records import Comparison, Record
from harness.statistics.stats import median

ALIKE = 1.05
"""Below this ratio to the fastest there is too little to explain."""
FASTEST, NEAR = "fastest", "within 5 % of the fastest"
Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """A record that was timed, and whose operators are known."""

    record: Record
    timed: Timed


def explained(records: Iterable[Record], baseline: str, compared: dict[Key, Comparison]) -> dict[Key, str]:
    """By workload id and implementation, the two largest reasons: "41 % page faults on the 128 MiB score matrix; ...".

    Cells that were not timed, or whose operators were not seen, have none.
    """
    workloads: dict[str, list[Record]] = {}
    for record in records:
        workloads.setdefault(record.workload.id, []).append(record)
    return {
        key: text for members in workloads.values() for key, text in _explained(members, baseline, compared).items()
    }


def _explained(members: list[Record], baseline: str, compared: dict[Key, Comparison]) -> dict[Key, str]:
    base_s = next((_own_s(one) for one in members if one.implementation == baseline), 0.0)
    cells: list[_Cell] = []
    for record in members:
        latency, call_s = record.measurement("latency"), _own_s(record)
        comparison = compared.get((record.workload.id, record.implementation))
        if base_s and comparison is not None:
            call_s = comparison.ratio * base_s  # the ratio is from the same blocks, and so the better witness
        if call_s and record.operators is not None:
            cells.append(_Cell(record=record, timed=Timed(operators=timed(record.operators, latency), call_s=call_s)))
    if not cells:
        return {}
    fastest = min(cells, key=lambda cell: cell.timed.call_s)
    return {(cell.record.workload.id, cell.record.implementation): _text(cell, fastest) for cell in cells}


def _text(cell: _Cell, fastest: _Cell) -> str:
    if cell is fastest:
        return FASTEST
    if cell.timed.call_s < ALIKE * fastest.timed.call_s:
        return NEAR
    told = reasons(cell.timed, fastest.timed, cell.record.workload)
    return "; ".join(told) or "no kind of operator takes longer"


def _own_s(record: Record) -> float:
    """The median time of a call; 0.0 where it was not timed."""
    latency = record.measurement("latency")
    return median(sample.value for sample in latency.samples) if latency is not None and latency.samples else 0.0
