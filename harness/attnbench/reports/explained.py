"""Why a cell takes longer than the fastest of its workload, in words for the table."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attnbench.analysis.breakdown import Timed, reasons, timed
from attnbench.statistics.intervals import median
from attnbench.storage.records import Arm, Comparison, Key, Record

ALIKE = 1.05
"""Below this ratio to the fastest there is too little to explain."""
FASTEST, NEAR = "fastest", "within 5 % of the fastest"


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """A record that was timed, and whose operators are known."""

    record: Record
    timed: Timed


def costs(
    records: Iterable[Record], reference: Callable[[Arm], Arm], compared: dict[Key, Comparison]
) -> dict[Key, float]:
    """By cell, the seconds of a call, by which the cells of a workload may be compared.

    Where there is a ratio to its reference, it is that times the base's own time: the ratio is from the same
    blocks, and so the better witness.
    """
    own_s = {
        one.key: median(sample.value for sample in latency.samples)
        for one in records
        if (latency := one.measurement("latency")) is not None and latency.samples
    }
    found = {}
    for (workload, arm), seconds in own_s.items():
        base_s, comparison = own_s.get((workload, reference(arm))), compared.get((workload, arm))
        found[workload, arm] = seconds if base_s is None or comparison is None else comparison.ratio * base_s
    return found


def explained(records: Iterable[Record], costs_s: dict[Key, float]) -> dict[Key, str]:
    """By cell, the two largest reasons: "41 % page faults on the 128 MiB score matrix; ...".

    `costs_s` is what `costs` says. Cells that were not timed, or whose operators were not seen, have none.
    """
    workloads: dict[str, list[Record]] = {}
    for record in records:
        workloads.setdefault(record.workload.id, []).append(record)
    return {key: text for members in workloads.values() for key, text in _explained(members, costs_s).items()}


def _explained(members: list[Record], costs_s: dict[Key, float]) -> dict[Key, str]:
    cells: list[_Cell] = []
    for record in members:
        call_s = costs_s.get(record.key, 0.0)
        if call_s and record.operators is not None:
            operators = timed(record.operators, record.measurement("latency"))
            cells.append(_Cell(record=record, timed=Timed(operators=operators, call_s=call_s)))
    if not cells:
        return {}
    fastest = min(cells, key=lambda cell: cell.timed.call_s)
    return {cell.record.key: _text(cell, fastest) for cell in cells}


def _text(cell: _Cell, fastest: _Cell) -> str:
    if cell is fastest:
        return FASTEST
    if cell.timed.call_s < ALIKE * fastest.timed.call_s:
        return NEAR
    told = reasons(cell.timed, fastest.timed, cell.record.workload)
    return "; ".join(told) or "no kind of operator takes longer"
