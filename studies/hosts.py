"""A hundred simulated hosts compared with one long run, and what a coordinator costs.

    python -m studies.hosts --to results/gallery/cluster
    python -m studies.hosts coordinator --to results/gallery/cluster

The hosts, the losses and the time are simulated (studies/simulated/cluster.py), the visits, journals and verdicts
are the real ones. The long run makes as many visits of each comparison on one calm host of each kind. Another
one, on other calm hosts, shows how far two long runs agree. The coordinator's costs are those of real journals that
grow, on the machine where the study runs.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import typer

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.hosts import Hosts, together
from attnbench.analysis.results import Results, read
from attnbench.reports.hosts import sentences
from attnbench.storage.events import Plan
from attnbench.storage.records import FALSE_SHARE, Verdict
from attnbench.units import duration, markdown_table, percent
from attnbench.workloads.workload import Workload
from studies import coordination
from studies.acceptance.method import upper_limit
from studies.simulated.cluster import NUM_VISITS, SimulatedHost, Tally, hundred, sweep
from studies.simulated.virtual import Seconds, plan

T = TypeVar("T", int, float)
Verdicts = dict[tuple[str, str, str], Verdict]
"""By CPU, workload and implementation."""
NAMES = ("baseline", "rival", "other")
CPUS = ("CPU A", "CPU B")
BETWEEN = 0.005
"""By how much the ratios of different code differ from host to host of a kind: a standard deviation of the log."""
CALL_S = 0.2
"""What a call of the baseline takes, about: as much as attention over some ten thousand tokens."""
LEAST_THROUGHPUT = 0.9
LEAST_COVERAGE, MOST_COVERAGE = 0.93, 0.98
RATIOS = (0.5, 0.7, 0.85, 0.93, 1.0, 1.0, 1.0, 1.07, 1.2, 1.5, 2.0)
"""True ratios to the baseline."""
TEXT = """# {num_hosts} simulated hosts

{repeats} sessions of {lasts} of virtual time: {num_workloads} workloads, {num_names} implementations, two kinds of CPU.
A host is lost each minute, and another joins two minutes later. Hosts and time are simulated; visits, journals and
statistics are the real ones. A host makes {num_visits} visits of a workload at a time. A long run makes as many of each
comparison as all hosts of a kind do, on one calm host of that kind.

{limits}

In a session:

{facts}

Of the first session:

{seen}

Made by {made}.
"""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What calls truly take on each kind of host, and on each host of it."""

    seed: int
    lengths: tuple[int, ...]

    def log(self, cpu: str, length: int, name: str) -> float:
        """The log ratio of an implementation to the baseline, as the mean of all hosts of a kind."""
        place, who, kind = self.lengths.index(length), NAMES.index(name), CPUS.index(cpu)
        return math.log(RATIOS[(place + 4 * who + 7 * kind) % len(RATIOS)]) if who else 0.0

    def of_host(self, name: str, cpu: str) -> Seconds:
        """What calls take on one host, when nothing disturbs it."""

        def seconds(workload: Workload, implementation: str) -> float:
            length = workload.seq_len
            log = self.log(cpu, length, implementation)
            if implementation != NAMES[0]:
                log += BETWEEN * random.Random(f"{self.seed}/{name}/{length}/{implementation}").gauss(0.0, 1.0)
            return CALL_S * (0.75 + 0.5 * self.lengths.index(length) / len(self.lengths)) * math.exp(log)

        return seconds


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What was found of one comparison on one kind of host."""

    many: Verdict  # of all hosts together
    one: Verdict  # of the long run
    other: Verdict  # of another long run
    log: float  # the true log ratio
    holds: bool  # whether the interval of all hosts holds it


@dataclass(frozen=True, kw_only=True)
class Session:
    """A sweep on many hosts, and the two long runs that it is compared with."""

    hosts: Sequence[SimulatedHost]
    plan: Plan
    truth: Truth
    tally: Tally
    found: Hosts
    pairs: list[Pair]

    def without_samples(self) -> "Session":
        """The same without the runs of its hosts, which take hundreds of megabytes."""
        return replace(self, found=replace(self.found, parts={}))

    @property
    def capacity_s(self) -> float:
        """What so many hosts would work, were none of them ever late, lost or replaced."""
        return self.plan.budget_s * sum(not host.name.startswith("new") for host in self.hosts)

    @property
    def counted(self) -> set[str]:
        """The hosts that count in any comparison."""
        return {name for cell in self.found.cells for name in cell.logs}

    @property
    def useful_s(self) -> float:
        """What hosts that count have worked inside visits that count."""
        return sum(self.tally.useful_s[name] for name in self.counted)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of each session."""

    num_hosts: int = 100
    num_workloads: int = 60
    budget_s: float = 1200.0
    repeats: int = 10


def session(seed: int, size: Size) -> Session:
    """One sweep and one long run, each judged."""
    asked = plan(size.num_workloads, NAMES, budget_s=size.budget_s, seed=seed)
    truth = Truth(seed=seed, lengths=tuple(workload.seq_len for workload in asked.workloads))
    hosts = list(hundred(size.num_hosts, CPUS, size.budget_s, seed))
    with tempfile.TemporaryDirectory(prefix="attnbench-hosts-") as folder:
        many, one = Path(folder) / "many", Path(folder) / "one"
        seconds = {host.name: truth.of_host(host.name, host.cpu) for host in hosts}
        tally = sweep(hosts, asked, seconds, many, seed=seed)
        found = together({path.name: read(path) for path in sorted(many.iterdir())})
        as_many_s = sum(tally.useful_s.values()) / len(CPUS)
        long_plan = msgspec.structs.replace(asked, budget_s=as_many_s)

        def long_run(name: str, seed: int) -> dict[str, Results]:
            lone = [SimulatedHost(name=f"{name} on {cpu}", cpu=cpu) for cpu in CPUS]
            sweep(lone, long_plan, {host.name: truth.of_host(host.name, host.cpu) for host in lone}, one, seed=seed)
            return {host.cpu: read(one / host.name) for host in lone}

        alone, again = long_run("long run", seed + 1), long_run("other long run", seed + 2)
    pairs = list(_pairs(found, _verdicts(alone), _verdicts(again), truth))
    return Session(hosts=hosts, plan=asked, truth=truth, tally=tally, found=found, pairs=pairs)


def _pairs(found: Hosts, one: Verdicts, other: Verdicts, truth: Truth) -> Iterator[Pair]:
    """Of each comparison on each kind of host."""
    for cell in found.cells:
        cpu, name, ratio = next(cpu for cpu in CPUS if cpu in cell.kind), cell.arm.implementation, cell.judgement
        log = truth.log(cpu, cell.workload.seq_len, name)
        holds = ratio.low is not None and ratio.high is not None and ratio.low <= math.exp(log) <= ratio.high
        key = cpu, cell.workload.id, name
        yield Pair(many=cell.verdict, one=one[key], other=other[key], log=log, holds=holds)


def _verdicts(of_runs: dict[str, Results]) -> Verdicts:
    """Of each comparison of runs that are given by CPU."""
    return {
        (cpu, each.workload.id, each.implementation): each.verdict
        for cpu, results in of_runs.items()
        for each in comparisons(results)
    }


def said(*, is_met: bool) -> str:
    """As the gallery says it."""
    return "met" if is_met else "MISSED"


def limits(sessions: Sequence[Session]) -> list[dict[str, str]]:
    """What was asked for, what was found, and whether that is enough."""
    pairs = [pair for each in sessions for pair in each.pairs]
    apart_from_one = sum(pair.many is not pair.one for pair in pairs)
    most = percent(upper_limit(apart_from_one, len(pairs)))
    opposite = sum({pair.many, pair.one} == {Verdict.faster, Verdict.slower} for pair in pairs)
    wrong = sum(pair.many not in {Verdict.undecided, truly(pair.log)} for pair in pairs)
    long_apart = sum(pair.other is not pair.one for pair in pairs)
    only_many, only_other = alone_apart(pairs)
    p_value = as_uneven(only_many, only_other)
    uneven = f"hosts alone differ in {only_many}, it alone in {only_other}: p = {percent(p_value)}"
    null = [pair.many for pair in pairs if pair.log == 0.0]
    alarms = sum(verdict in {Verdict.faster, Verdict.slower} for verdict in null)
    shares = [each.useful_s / each.capacity_s for each in sessions]
    num_held = sum(pair.holds for pair in pairs)
    cover = num_held / len(pairs)
    apart = [_opposed(each) for each in sessions]
    missed, spurious = sum(len(truly_ - found) for truly_, found in apart), sum(len(f - t) for t, f in apart)
    rows = [
        (
            "verdicts, for each kind of host, equal to those of one long run",
            "all",
            f"{len(pairs) - apart_from_one:,} of {len(pairs):,} (at most {most} differ, 99 % limit)",
            not apart_from_one,
        ),
        (
            "verdicts of another long run equal to those; hosts differ no more often than it (sign test)",
            f"p above {percent(FALSE_SHARE)}",
            f"{len(pairs) - long_apart:,} of {len(pairs):,}; {uneven}",
            p_value > FALSE_SHARE,
        ),
        (
            "verdicts opposite to those of one long run; decided, and not as the truth is",
            "none; none",
            f"{opposite}; {wrong}",
            not opposite and not wrong,
        ),
        (
            "false alarms: as fast on the mean of all hosts, and called faster or slower",
            f"at most {percent(FALSE_SHARE)}",
            f"{alarms} of {len(null)}",
            alarms <= FALSE_SHARE * len(null),
        ),
        (
            "throughput: time inside visits that count, of that of as many hosts that are never idle",
            f"at least {percent(LEAST_THROUGHPUT)}",
            from_to(shares, percent),
            min(shares) >= LEAST_THROUGHPUT,
        ),
        (
            "the interval of a kind holds the mean of all of its hosts",
            f"{percent(LEAST_COVERAGE)} to {percent(MOST_COVERAGE)}",
            f"{num_held:,} of {len(pairs):,} ({percent(cover)})",
            LEAST_COVERAGE <= cover <= MOST_COVERAGE,
        ),
        (
            "faster on one kind of host and slower on the other: found; called so and not so",
            "all; none",
            f"{sum(len(t & f) for t, f in apart)} of {sum(len(t) for t, _ in apart)}; {spurious}",
            not missed and not spurious,
        ),
    ]
    return [
        {"what": what, "limit": limit, "found": found, "": said(is_met=is_met)} for what, limit, found, is_met in rows
    ]


def alone_apart(pairs: Sequence[Pair]) -> tuple[int, int]:
    """In how many comparisons only all hosts differ from the long run, and in how many only the other long run does."""
    many = sum(pair.many is not pair.one and pair.other is pair.one for pair in pairs)
    other = sum(pair.other is not pair.one and pair.many is pair.one for pair in pairs)
    return many, other


def as_uneven(ours: int, theirs: int) -> float:
    """How often so many or more of both are ours by chance, where each is as likely ours as theirs.

    Source: Q. McNemar, 1947, https://doi.org/10.1007/BF02295996 (two classifications of the same objects).
    """
    both = ours + theirs
    return sum(math.comb(both, number) for number in range(ours, both + 1)) * 0.5**both


def from_to(values: Sequence[T], shown: Callable[[T], str] = str) -> str:
    """The least and the largest of some values."""
    ends = shown(min(values)), shown(max(values))
    return ends[0] if len(set(ends)) == 1 else " to ".join(ends)


def truly(log: float) -> Verdict:
    """The verdict that a true log ratio deserves: those that are planted are 1, or differ by 7 % or more."""
    return Verdict.equivalent if log == 0.0 else Verdict.slower if log > 0 else Verdict.faster


def _opposed(each: Session) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """The comparisons whose kinds truly are opposed, and those that were found to be."""
    cells = [(workload.seq_len, name) for workload in each.plan.workloads for name in NAMES[1:]]
    true = {
        (length, name)
        for length, name in cells
        if math.prod(math.copysign(1, each.truth.log(cpu, length, name)) for cpu in CPUS) < 0
        and all(each.truth.log(cpu, length, name) for cpu in CPUS)
    }
    return true, {(cells[0].workload.seq_len, cells[0].arm.implementation) for cells in each.found.opposed.values()}


def facts(sessions: Sequence[Session]) -> list[dict[str, str]]:
    """What went on in a session: the least and the most of all sessions."""
    counted = [len(cell.logs) for each in sessions for cell in each.found.cells]
    return [
        {
            "hosts": from_to([len(each.hosts) for each in sessions]),
            "joined later": from_to([sum(host.joins_s > 0 for host in each.hosts) for each in sessions]),
            "lost": from_to([len(each.tally.lost) for each in sessions]),
            "slow": from_to([sum(host.slowness > 1 for host in each.hosts) for each in sessions]),
            "drifting or disturbed": from_to([sum(host.world != "calm" for host in each.hosts) for each in sessions]),
            "visits": from_to([sum(each.tally.num_visits.values()) for each in sessions], "{:,}".format),
            "cut short": from_to([each.tally.num_cut for each in sessions]),
            "hosts of a comparison": from_to(counted),
        }
    ]


def simulate(to: Path, size: Size, seed: int) -> str:
    """Simulate all sessions, and write the page; returns it."""
    began_s = time.process_time()
    sessions: list[Session] = []
    seen: list[str] = []
    for number in range(size.repeats):
        each = session(seed + 1000 * number, size)
        if not sessions:
            seen = sentences(each.found)[: len(CPUS)]
        sessions.append(each.without_samples())
    rows = limits(sessions)
    seen += [f"{host}: {why}" for host, why in sessions[0].found.failed.items()]
    made = f"`python -m studies.hosts --to DIR --seed {seed} --repeats {size.repeats}`"
    text = TEXT.format(
        num_hosts=size.num_hosts,
        num_visits=NUM_VISITS,
        repeats=size.repeats,
        lasts=duration(size.budget_s),
        num_workloads=size.num_workloads,
        num_names=len(NAMES),
        limits=markdown_table(rows),
        facts=markdown_table(facts(sessions)),
        seen="\n".join(f"- {line}" for line in seen),
        made=f"{made} in {time.process_time() - began_s:.0f} s of processor time",
    )
    to.mkdir(parents=True, exist_ok=True)
    (to / "hosts.md").write_text(text, encoding="utf-8")
    return text


def coordinator(to: Path, sizes: Sequence[int] = coordination.SIZES, *, is_with_ray: bool = False) -> str:
    """Measure what a coordinator costs, with Ray where it is installed, and write the page; returns it."""
    costs = coordination.measure(sizes)
    text = coordination.page(costs, coordination.over_ray(costs[0].journal_bytes) if is_with_ray else None)
    to.mkdir(parents=True, exist_ok=True)
    (to / "coordinator.md").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("simulate", "coordinator"), default="simulate")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=Size.repeats, help="so many sessions")
    given = parser.parse_args()
    if given.what == "simulate":
        typer.echo(simulate(given.to, Size(repeats=given.repeats), given.seed))
    else:
        typer.echo(coordinator(given.to, is_with_ray=True))


if __name__ == "__main__":
    main()
