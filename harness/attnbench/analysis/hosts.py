"""Runs of one plan on several hosts: the verdict on each comparison for each kind of host.

A host's processes are further processes, clustered by host: each host gives one number, the mean over its processes.
With fewer than four hosts of a kind nothing is known of how far hosts lie apart, and the one with the most processes
speaks for itself alone. Kinds, which are other models of processor or accelerator, are never put together.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter

from attnbench.analysis.comparisons import Answer, Compared, answer, compared, comparison, doubts
from attnbench.analysis.results import Results, replicas
from attnbench.statistics.verdict import FEWEST_PROCESSES, Effect, Judgement, doubted, effect, judge
from attnbench.storage.records import BOOT, Arm, Comparison, Environment, Key, Record, Verdict
from attnbench.workloads.workload import Workload

FEWEST_HOSTS = FEWEST_PROCESSES
"""With fewer, an interval holds for one host alone."""
CHANGED = "its machine changed during the run"
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Across:
    """One comparison on one kind of host."""

    workload: Workload
    arm: Arm
    baseline: str
    kind: str
    judgement: Judgement
    logs: Mapping[str, float]  # the mean log ratio of each host
    comparison: Comparison  # the same, as those who ask for comparisons get it

    @property
    def is_general(self) -> bool:
        """Whether the interval is one for hosts of this kind, and not for a single host."""
        return len(self.logs) >= FEWEST_HOSTS

    @property
    def verdict(self) -> Verdict:
        """On the arm, relative to the baseline."""
        return self.judgement.verdict


@dataclass(frozen=True, kw_only=True, eq=False)
class Hosts:
    """What the hosts of a run say together."""

    parts: Mapping[str, Results]  # by the host's name
    failed: dict[str, str]  # the hosts that do not count, and why
    cells: list[Across]

    @property
    def is_replicated(self) -> bool:
        """Whether several hosts have measured one cell."""
        places = (dict.fromkeys(record.workload.id for record in part.records) for part in self.parts.values())
        return max(Counter(workload for ids in places for workload in ids).values(), default=0) > 1

    @cached_property
    def one_machine(self) -> list[list[str]]:
        """Hosts that are of one machine, together: they say nothing of how far machines lie apart."""
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
        """Comparisons that are faster on one kind of host and slower on another."""
        found: dict[Key, list[Across]] = {}
        for cell in self.cells:
            found.setdefault((cell.workload.id, cell.arm), []).append(cell)
        both = {Verdict.faster, Verdict.slower}
        return {key: cells for key, cells in found.items() if both <= {cell.verdict for cell in cells}}

    @cached_property
    def answers(self) -> dict[str, list[Answer]]:
        """By kind, what the verdicts say of each workload; of two sides nothing."""
        if any(part.plan.sides is not None for part in self.parts.values()):
            return {}
        groups: dict[tuple[str, str], list[Comparison]] = {}
        for cell in self.cells:
            groups.setdefault((cell.kind, cell.workload.id), []).append(cell.comparison)
        found: dict[str, list[Answer]] = {}
        for (kind, _), own in groups.items():
            found.setdefault(kind, []).append(answer(own))
        return found


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
    failed = {
        host: CHANGED
        for host, part in parts.items()
        if len({each.machine_fingerprint for each in part.environments.values()}) > 1 and plan.sides is None
    }
    seen: dict[tuple[Key, str], dict[str, Compared]] = {}
    for host, part in parts.items():
        for key, cell in compared(part).items() if host not in failed else ():
            seen.setdefault((key, _kind(cell.record)), {})[host] = cell
    judged = judge({place: _effect(hosts) for place, hosts in seen.items()}, plan.smallest_effect, plan.false_share)
    disturbed = {host for host, part in parts.items() if doubts(part)}
    judged |= doubted({place: each for place, each in judged.items() if disturbed & seen[place].keys()})
    return Hosts(
        parts=dict(parts),
        failed=failed,
        cells=[_across(kind, seen[key, kind], each) for (key, kind), each in judged.items()],
    )


def _effect(hosts: Mapping[str, Compared]) -> Effect:
    """One number from each host, or those of the processes of one host."""
    if len(hosts) >= FEWEST_HOSTS:
        return effect([_mean(cell) for cell in hosts.values()], is_watched=False)
    most = max(hosts, key=lambda host: len(hosts[host].numbers))
    return hosts[most].effect


def _mean(cell: Compared) -> float:
    return sum(cell.numbers.values()) / len(cell.numbers)


def _across(kind: str, hosts: Mapping[str, Compared], judged: Judgement) -> Across:
    first = next(iter(hosts.values()))
    return Across(
        workload=first.record.workload,
        arm=first.record.arm,
        baseline=first.baseline.implementation,
        kind=kind,
        judgement=judged,
        logs={host: _mean(cell) for host, cell in hosts.items()},
        comparison=comparison(judged, first.record, first.baseline),
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
