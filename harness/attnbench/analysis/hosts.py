"""Runs of one plan on several hosts: the verdict on each comparison for each kind of host, and who wins where.

Each host has a run, or a part of one, of its own, with its own blocks, interference and A/A controls; only what these
show is put together, by statistics/hosts.py. Hosts of other kinds stay side by side. Why: docs/adr/0039.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter

from attnbench.analysis.comparisons import NEAR, Compared, compared
from attnbench.analysis.results import Results, replicas
from attnbench.statistics.hosts import OfKind, Seen, by_kind, failing, untested
from attnbench.statistics.intervals import Estimate, Pairs, pairs
from attnbench.statistics.verdicts import ALONE, CELLS, Judgement, judge, paired_effect, within
from attnbench.storage.records import BOOT, LATENCY, Arm, Environment, Key, Record, Verdict
from attnbench.workloads.workload import Workload

CHANGED = "its machine changed during the run"
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Across:
    """One comparison on one kind of host."""

    workload: Workload
    arm: Arm
    baseline: str
    of_kind: OfKind
    judgement: Judgement

    @property
    def kind(self) -> str:
        """The kind of host."""
        return self.of_kind.kind

    @property
    def ratio(self) -> Estimate:
        """How many times longer the arm takes than the baseline on this kind of host."""
        return self.judgement.effect.ratio

    @property
    def verdict(self) -> Verdict:
        """On the arm, relative to the baseline."""
        return self.judgement.verdict


@dataclass(frozen=True, kw_only=True)
class Leader:
    """The implementation that takes the least time on a workload on one kind of host."""

    workload: Workload
    kind: str
    implementation: str
    rivals: tuple[str, ...]  # those that are not clearly slower; none: it is clear


@dataclass(frozen=True, kw_only=True, eq=False)
class Hosts:
    """What the hosts of a run say together."""

    parts: Mapping[str, Results]  # by the host's name
    failed: dict[str, str]  # the hosts that do not count, and why
    untested: set[str]  # those too short for an A/A test of their own: they count where too few others are
    cells: list[Across]
    floors: dict[tuple[str, str], Estimate]  # by host and workload: the baseline's A/A control relative to it

    @property
    def is_replicated(self) -> bool:
        """Whether several hosts have measured one cell."""
        places = (dict.fromkeys(record.workload.id for record in part.records) for part in self.parts.values())
        return max(Counter(workload for ids in places for workload in ids).values(), default=0) > 1

    @cached_property
    def one_machine(self) -> list[list[str]]:
        """The hosts that are of one machine, together: they say nothing of how far machines lie apart."""
        found: dict[str, list[str]] = {}
        for name, part in self.parts.items():
            for boot in boots(part):
                found.setdefault(boot, []).append(name)
        return [list(names) for names in dict.fromkeys(tuple(each) for each in found.values() if len(each) > 1)]

    @cached_property
    def kinds(self) -> dict[str, list[str]]:
        """The hosts of each kind; those without any environment are of a kind of their own."""
        found: dict[str, list[str]] = {}
        for name, part in self.parts.items():
            for kind in dict.fromkeys(map(kind_of, part.environments.values())) or {UNKNOWN: None}:
                found.setdefault(kind, []).append(name)
        return found

    @property
    def opposed(self) -> dict[Key, list[Across]]:
        """The comparisons that are faster on one kind of host and slower on another."""
        found: dict[Key, list[Across]] = {}
        for cell in self.cells:
            found.setdefault((cell.workload.id, cell.arm), []).append(cell)
        both = {Verdict.faster, Verdict.slower}
        return {key: cells for key, cells in found.items() if both <= {cell.verdict for cell in cells}}

    @cached_property
    def leaders(self) -> list[Leader]:
        """Who is the fastest on each workload, by kind: clearly so where all near it are slower; of sides nobody."""
        if any(part.plan.sides is not None for part in self.parts.values()):
            return []
        groups: dict[tuple[str, str], list[Across]] = {}
        for cell in self.cells:
            groups.setdefault((cell.workload.id, cell.kind), []).append(cell)
        return [self._leader(cells) for cells in groups.values()]

    def _leader(self, cells: list[Across]) -> Leader:
        """The fastest of a workload's cells on one kind and their baseline, whose ratio is 1."""
        workload, kind, baseline = cells[0].workload, cells[0].kind, cells[0].baseline
        times = {baseline: 1.0} | {cell.arm.implementation: cell.ratio.point for cell in cells}
        verdicts = {cell.arm.implementation: cell.verdict for cell in cells}
        first, *others = sorted(times, key=lambda name: (times[name], name != baseline))
        near = [name for name in others if times[name] <= NEAR * times[first]] or others[:1]
        if first == baseline:
            open_to = [name for name in near if verdicts[name] is not Verdict.slower]
        else:
            slower = self._slower(workload, kind, first, [name for name in near if name != baseline])
            is_behind = verdicts[first] is Verdict.faster  # the baseline
            open_to = [name for name in near if not (is_behind if name == baseline else slower.get(name, False))]
        return Leader(workload=workload, kind=kind, implementation=first, rivals=tuple(open_to))

    def _slower(self, workload: Workload, kind: str, first: str, rivals: list[str]) -> dict[str, bool]:
        """Whether each rival is slower than the first on this kind of host, by their pairs in the same blocks."""
        found: dict[str, OfKind] = {}
        for rival in rivals:
            seen = [each for each in self._seen_apart(workload.id, rival, first) if each.kind == kind]
            of_kind = by_kind(seen, self.failed, self._smallest, self.untested).get(kind)
            if of_kind is not None:
                found[rival] = of_kind
        judged = judge([each.effect for each in found.values()], within(ALONE, self._false_share))
        return {name: each.verdict is Verdict.slower for name, each in zip(found, judged, strict=True)}

    def _seen_apart(self, workload: str, one: str, other: str) -> Iterator[Seen]:
        for host, part in self.parts.items():
            records = {record.implementation: record for record in part.records if record.workload.id == workload}
            if not {one, other} <= set(records):
                continue
            discarded = part.discarded.get(workload, frozenset())
            blocks = pairs(records[one].samples(LATENCY), records[other].samples(LATENCY), discarded)
            is_alone = part.plan.runner(records[one].arm) != part.plan.runner(records[other].arm)
            counted = blocks.by_epoch() if is_alone else blocks
            floor = self.floors.get((host, workload))
            effect = paired_effect(counted, floor, self._smallest, within=blocks if is_alone else None)
            if effect is not None:
                yield Seen(host=host, kind=_kind(records[one]), effect=effect, control=floor)

    @property
    def _smallest(self) -> float:
        return next(iter(self.parts.values())).plan.smallest_effect

    @property
    def _false_share(self) -> float:
        return next(iter(self.parts.values())).plan.false_share


def kind_of(environment: Environment) -> str:
    """What must be the same for the times of two hosts to be put together: the model and what it runs with, in words.

    Memory and the version of the system are not among it: they differ among the hosts of one order.
    """
    cores = f"{environment.num_physical_cores} core{'s' * (environment.num_physical_cores > 1)}"
    threads = f"{environment.num_threads} threads" if environment.num_threads else ""
    torch = f"torch {environment.versions['torch']}" if "torch" in environment.versions else ""
    parts = (environment.accelerator, environment.cpu, cores, environment.cpu_capability, threads, torch)
    return ", ".join(part for part in parts if part)


def _kind(record: Record) -> str:
    return UNKNOWN if record.environment is None else kind_of(record.environment)


def together(parts: Mapping[str, Results]) -> Hosts:
    """The verdicts of the hosts' runs, by the hosts' names, which are judged together, for each kind of host.

    Raises:
        ValueError: no run, or they compare with another baseline or by other rules.
    """
    _require_one_plan(parts)
    plan = next(iter(parts.values())).plan
    seen: dict[Key, list[Seen]] = {}
    first: dict[Key, Compared] = {}
    controls: dict[str, list[Pairs]] = {}
    floors: dict[tuple[str, str], Estimate] = {}
    failed = {}
    for host, part in parts.items():
        if len({each.machine_fingerprint for each in part.environments.values()}) > 1 and plan.sides is None:
            failed[host] = CHANGED
        own: dict[str, Pairs] = {}  # by what they are controls of: all arms of a workload share it
        for cell in compared(part):
            key = cell.record.workload.id, cell.record.arm
            first.setdefault(key, cell)
            one = Seen(host=host, kind=_kind(cell.record), effect=cell.effect, control=cell.floor)
            seen.setdefault(key, []).append(one)
            if cell.floor is not None:
                floors[host, cell.record.workload.id] = cell.floor
            place = f"{cell.baseline.workload.id}/{cell.baseline.arm}"
            if len(cell.controls.logs) > len(own[place].logs if place in own else ()):
                own[place] = cell.controls
        controls[host] = list(own.values())
    failed = failing(controls, plan.smallest_effect) | failed
    short = untested(controls)
    found = [
        (first[key], of_kind)
        for key, members in seen.items()
        for of_kind in by_kind(members, failed, plan.smallest_effect, short).values()
    ]
    policy = within(ALONE if plan.sides is None else CELLS, plan.false_share)
    return Hosts(
        parts=dict(parts),
        failed=failed,
        untested=short,
        floors=floors,
        cells=[
            Across(
                workload=cell.record.workload,
                arm=cell.record.arm,
                baseline=cell.baseline.implementation,
                of_kind=of_kind,
                judgement=judgement,
            )
            for (cell, of_kind), judgement in zip(found, judge([each.effect for _, each in found], policy), strict=True)
        ],
    )


def _require_one_plan(parts: Mapping[str, Results]) -> None:
    if not parts:
        raise ValueError("no host has a run: give the folder of at least one")
    rules = attrgetter("baseline", "smallest_effect", "false_share", "cache", "allocator", "metrics")
    first, *others = parts
    for other in others:
        if rules(parts[first].plan) != rules(parts[other].plan):
            asked = "give runs with the same baseline, smallest effect, false share, cache, allocator and metrics"
            raise ValueError(f"{first} and {other} were measured by other rules, and cannot be put together: {asked}")


def boots(results: Results) -> set[str]:
    """By what the machine of a run is known: a digest for each start of its system; none in older journals."""
    found = (record.environment for record in results.records if record.environment is not None)
    return {boot for each in found if (boot := each.moment.get(BOOT))}


def require_machines(parts: Mapping[str, Results]) -> None:
    """Check that runs which are to stand for a host each are of different machines, as far as they say it.

    Raises:
        ValueError: two are of one machine.
    """
    known: dict[str, str] = {}
    for name, part in parts.items():
        for place in boots(part) or set(part.hosts):
            other = known.setdefault(place, name)
            if other != name:
                same = f"{other} and {name} were measured on one machine, and --hosts takes runs of several"
                raise ValueError(f"{same}: give one run of each machine, or leave --hosts out to see them side by side")


@lru_cache(maxsize=1)
def of_run(results: Results) -> Hosts | None:
    """What the hosts of a run say together; None where it was on one machine.

    Each has a journal of its own, or its cells are among those of the run, where each is of one host.

    Raises:
        ValueError: the journal of a host cannot be read, or see `together`.
    """
    parts = parts_of(results)
    return together(parts) if parts else None


def parts_of(results: Results) -> dict[str, Results]:
    """What each host of a run has measured of it, by its name; nothing where it was on one machine.

    Raises:
        ValueError: the journal of a host cannot be read.
    """
    return replicas(results) or {
        host: replace(results, records=tuple(record for record in results.records if record.host == host))
        for host in results.hosts
    }


def shown(results: Results) -> Results:
    """A run whose tables show, of each workload that several hosts have measured, the first host that counts."""
    found = of_run(results)
    if found is None or not found.failed or not replicas(results):
        return results
    there = {host: {record.workload.id for record in part.records} for host, part in found.parts.items()}
    chosen = {}
    for record in results.records:
        counted = (host for host, ids in there.items() if host not in found.failed and record.workload.id in ids)
        if record.host in found.failed and (host := next(counted, None)) is not None:
            chosen[record.workload.id] = found.parts[host]
    records, warnings = [], dict(results.warnings)
    for record in results.records:
        part = chosen.get(record.workload.id)
        if part is None:
            records.append(record)
            continue
        records += [each for each in part.records if each.key == record.key]
        warnings[record.key] = part.warnings.get(record.key, ())
    return replace(
        results,
        records=tuple(records),
        warnings=warnings,
        num_visits=results.num_visits | {workload: part.num_visits[workload] for workload, part in chosen.items()},
        discarded=results.discarded
        | {workload: part.discarded.get(workload, frozenset()) for workload, part in chosen.items()},
        host_ceilings=results.host_ceilings | {k: v for part in chosen.values() for k, v in part.host_ceilings.items()},
    )
