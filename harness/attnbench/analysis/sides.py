"""Match the cells of two states of the code; find cells that were lost, went wrong or were not tried."""

from collections.abc import Iterable
from dataclasses import dataclass

from attnbench.analysis.results import Results
from attnbench.storage.records import BASE, Record, Status


@dataclass(frozen=True, kw_only=True)
class Match:
    """The records of one cell in two states of the code; one of them may be missing."""

    key: tuple[str, str]  # workload id and implementation
    base: Record | None
    candidate: Record | None

    @property
    def records(self) -> list[Record]:
        """The records that exist, the base's first."""
        return [record for record in (self.base, self.candidate) if record is not None]

    @property
    def is_ok(self) -> bool:
        """Whether the cell exists in both states and is ok in both."""
        return [record.status for record in self.records] == [Status.ok, Status.ok]

    def __str__(self) -> str:
        return f"{self.key[1]} on {self.key[0]}"


def matched(base: Iterable[Record], candidate: Iterable[Record]) -> list[Match]:
    """Match the cells of two states by workload and implementation; cells that only the candidate has come last."""
    before = {(record.workload.id, record.implementation): record for record in base}
    after = {(record.workload.id, record.implementation): record for record in candidate}
    return [Match(key=key, base=before.get(key), candidate=after.get(key)) for key in {**before, **after}]


def by_side(results: Results) -> tuple[list[Record], list[Record]]:
    """Split the records of a comparison of two states of the code into those of the base and of the candidate."""
    base = [record for record in results.records if record.side == BASE]
    return base, [record for record in results.records if record.side != BASE]


def failed(results: Results) -> list[tuple[Record, str]]:
    """Return (record, description) for each cell of the candidate that is wrong, failed, or ok only in the base."""
    failures = []
    for match in matched(*by_side(results)):
        record, before = match.candidate, None if match.base is None else match.base.status
        if record is None:
            continue
        is_gone = before is Status.ok and record.status is not Status.ok and not record.is_predicted
        if record.is_finding or is_gone:
            note = "" if before is None else f" (the base: {before})"
            status = "WRONG" if record.is_wrong else record.status
            failures.append((record, f"{status}: {match}{note}: {record.message}"))
    return failures


def losses(results: Results) -> list[str]:
    """List regressions of the candidate except those of speed, one line each: lost implementations and failed cells."""
    sides = results.plan.sides
    assert sides is not None
    return [f"lost: {name}: {reason}" for name, reason in sides.lost.items()] + [line for _, line in failed(results)]


def untried(results: Results) -> dict[str, str]:
    """Return the cells that are ok on one side but skipped on the other because of a prediction, as {cell: reason}."""
    skipped = dict[str, str]()
    for match in matched(*by_side(results)):
        if Status.ok in {record.status for record in match.records}:
            predicted = (record for record in match.records if record.is_predicted)
            skipped |= {f"{record.arm} on {record.workload.id}": record.message for record in predicted}
    return skipped
