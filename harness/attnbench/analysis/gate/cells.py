"""Which cell of one run is which of the other: the same, renamed, gone or new."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from attnbench.analysis.gate.rulings import LATENCY
from attnbench.analysis.results import Results
from attnbench.plugins import name_of
from attnbench.storage.records import Record
from attnbench.workloads.workload import Workload

Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Couple:
    """A cell as both runs have it; one of them may not."""

    base: Record | None
    candidate: Record | None

    @property
    def key(self) -> Key:
        """Workload id and implementation: the candidate's names, where it has the cell."""
        record = self.candidate or self.base
        assert record is not None
        return record.workload.id, record.implementation

    @property
    def renamed_from(self) -> str:
        """What another name of the same thing was; empty where the names are the same."""
        if self.base is None or self.candidate is None:
            return ""
        before = self.base.implementation, self.base.workload.id
        after = self.candidate.implementation, self.candidate.workload.id
        return ", ".join(old for old, new in zip(before, after, strict=True) if old != new)


def couples(base: Results, candidate: Results) -> list[Couple]:
    """Every cell of either run, the base's first, in the order of their plans."""
    implementations = _renamed_implementations(base, candidate)
    workloads = _renamed_workloads(base, candidate)

    def now(key: Key) -> Key:
        return workloads.get(key[0], key[0]), implementations.get(key[1], key[1])

    return matched(base.records, candidate.records, now)


def matched(
    base: Iterable[Record], candidate: Iterable[Record], now: Callable[[Key], Key] = lambda key: key
) -> list[Couple]:
    """Every record of either side; `now` says what a cell of the base is called on the other."""
    found = {(record.workload.id, record.implementation): record for record in candidate}
    made = [
        Couple(base=record, candidate=found.pop(now((record.workload.id, record.implementation)), None))
        for record in base
    ]
    return [*made, *(Couple(base=None, candidate=record) for record in found.values())]


def _renamed_implementations(base: Results, candidate: Results) -> dict[str, str]:
    """Old names to new: one that is gone, and one that is new, with the same source."""
    before, after = _digests(base), _digests(candidate)
    return _unique(
        {name: digest for name, digest in before.items() if name not in after and digest},
        {name: digest for name, digest in after.items() if name not in before and digest},
    )


def _digests(results: Results) -> dict[str, str]:
    return {name_of(spec): results.plan.digests.get(spec, "") for spec in results.plan.implementations}


def _renamed_workloads(base: Results, candidate: Results) -> dict[str, str]:
    """Old ids to new: one that is gone, and one that is new, that ask for the same work."""
    before = {workload.id: _work(workload, _num_threads(base)) for workload in base.plan.workloads}
    after = {workload.id: _work(workload, _num_threads(candidate)) for workload in candidate.plan.workloads}
    return _unique(
        {name: work for name, work in before.items() if name not in after},
        {name: work for name, work in after.items() if name not in before},
    )


def _work(workload: Workload, num_threads: int) -> str:
    """What is computed, by how many threads; from which random numbers is left out."""
    same = msgspec.structs.replace(workload, seed=0, num_threads=workload.num_threads or num_threads)
    return same.id


def _num_threads(results: Results) -> int:
    """What an axis num_threads=0 stood for."""
    return next((record.environment.num_threads for record in results.records if record.environment is not None), 0)


def _unique(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Each name of `before` with the name of `after` that holds the same, where each is the only one on its side."""
    return {
        old: new
        for old, held in before.items()
        for new in _holding(after, held)
        if len(list(_holding(before, held))) == 1 == len(list(_holding(after, held)))
    }


def _holding(names: Mapping[str, str], held: str) -> Iterable[str]:
    return (name for name, other in names.items() if other == held)


def alive(found: Iterable[Couple]) -> Iterator[tuple[Record, Record]]:
    """The couples that both runs have."""
    for couple in found:
        if couple.base is not None and couple.candidate is not None:
            yield couple.base, couple.candidate


def metrics(found: Iterable[Couple]) -> set[str]:
    """Every metric with a pass of its own that either run holds."""
    records = [record for couple in found for record in (couple.base, couple.candidate) if record is not None]
    return {each.metric for record in records for each in record.measurements if not each.metric.startswith(LATENCY)}
