"""Which cell of one run is which of the other: the same, renamed, gone or new."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from attnbench.analysis.gate.rulings import Key
from attnbench.analysis.results import Results
from attnbench.plugins import name_of
from attnbench.storage.records import Record


@dataclass(frozen=True, kw_only=True)
class Match:
    """A cell as both runs have it; one of them may not."""

    base: Record | None
    candidate: Record | None

    @property
    def key(self) -> Key:
        """Workload id and implementation: the candidate's names, where it has the cell."""
        record = self.candidate or self.base
        assert record is not None
        return key_of(record)

    @property
    def renamed_from(self) -> str:
        """The older names of the cell; empty where the names are the same."""
        if self.base is None or self.candidate is None:
            return ""
        before = self.base.implementation, self.base.workload.id
        after = self.candidate.implementation, self.candidate.workload.id
        return ", ".join(old for old, new in zip(before, after, strict=True) if old != new)


def key_of(record: Record) -> Key:
    """The workload id and the implementation of a record, whatever its side."""
    return record.workload.id, record.implementation


def match_runs(base: Results, candidate: Results) -> list[Match]:
    """Every cell of either run, the base's first, in the order of their plans."""

    def digests(results: Results) -> dict[str, str]:
        """The source of each implementation; empty where it has none."""
        return {name_of(spec): results.plan.digests.get(spec, "") for spec in results.plan.implementations}

    def work(results: Results) -> dict[str, str]:
        """What each workload computes, by how many threads; the seed of its random numbers is left out."""
        environments = (record.environment for record in results.records if record.environment is not None)
        default = next((environment.num_threads for environment in environments), 0)  # what num_threads=0 stood for
        return {
            each.id: msgspec.structs.replace(each, seed=0, num_threads=each.num_threads or default).id
            for each in results.plan.workloads
        }

    implementations = _renamed(digests(base), digests(candidate))
    workloads = _renamed(work(base), work(candidate))

    def renamed(key: Key) -> Key:
        return workloads.get(key[0], key[0]), implementations.get(key[1], key[1])

    return match(base.records, candidate.records, renamed)


def match(
    base: Iterable[Record], candidate: Iterable[Record], renamed: Callable[[Key], Key] = lambda key: key
) -> list[Match]:
    """Every record of either side; `renamed` says what a cell of the base is called on the other."""
    rest = {key_of(record): record for record in candidate}
    matches = [Match(base=record, candidate=rest.pop(renamed(key_of(record)), None)) for record in base]
    return [*matches, *(Match(base=None, candidate=record) for record in rest.values())]


def _renamed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Old names to new: one that is gone and one that is new, where each is the only one with the same content."""
    gone = {name: content for name, content in before.items() if content and name not in after}
    new = {name: content for name, content in after.items() if content and name not in before}
    num_gone, num_new = Counter(gone.values()), Counter(new.values())
    names = {content: name for name, content in new.items()}
    return {name: names[content] for name, content in gone.items() if num_gone[content] == num_new[content] == 1}
