"""`python -m studies.acceptance V1 V4 --sessions 5`: tests of the method's promises, V1 to V9.

Real sessions have a known truth; V2, V3 and V5 also simulate worlds. Each session is stored when it ends, so that an
interrupted study can be resumed. `--list` prints what each test costs. `--old TREE` also runs an older attnbench from a
checkout, in turns with this one. G1 to G5, for CUDA devices, are in on_cuda.py.
"""

import itertools
import math
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from attnbench.units import markdown_table
from studies import frame
from studies.acceptance import absolute, method, sessions
from studies.acceptance.method import COVERAGE
from studies.acceptance.outcome import Outcome, at_least, at_most
from studies.frame import Row

FOLDER = Path("results/gallery/acceptance")
FALSE, NEAR, CLOSE, EQUAL = 0.05, 0.1, 0.03, 0.7
"""Limits: false verdicts (share), error of a time, width of "the same time" (both relative), and the share of equal
comparisons that must be called equal."""
BUDGET_S, OURS = 10.0, "attnbench"
WITH_OLD, OLD = ("V1", "V4", "V6", "V8"), ", older"
"""Tests that `--old` runs with an older attnbench, too, and the suffix of their names."""
Take = Callable[..., Sequence[Row]]
"""Runs the session of this number; those of `WITH_OLD` also take the tree of the package."""
Judge = Callable[[Sequence[Row]], tuple[str, bool]]


@dataclass(frozen=True, kw_only=True)
class Test:
    """One acceptance test: how to run a session, the number of sessions, and how to judge their rows."""

    id: str
    title: str
    limit: str
    number: int  # number of sessions
    seconds: float  # of one session, on two cores
    take: Take
    judge: Judge


def _one(take: Callable[..., Row], number: int, **settings: float | bool | Path) -> list[Row]:
    return [take(number, **settings)]


def _count(rows: Sequence[Row], *verdicts: str) -> int:
    return sum(row["verdict"] in verdicts for row in rows)


def _same(rows: Sequence[Row]) -> tuple[str, bool]:
    """Judge identical code: no verdict of slower or faster, and both sides treated alike."""
    alike, false = sum(row.get("alike") == 1.0 for row in rows), _count(rows, "slower", "faster")
    found = f"settings equal in {alike} of {len(rows)}; false verdicts {at_most(false, len(rows))}; "
    found += f"equal in {_count(rows, 'equivalent')}"
    return found, alike == len(rows) and false <= FALSE * len(rows)


def _planted(rows: Sequence[Row], least: float) -> tuple[str, bool]:
    slower, equal = _count(rows, "slower"), _count(rows, "equivalent")
    loads = [row["load"] for row in rows]
    found = f"slower in {at_least(slower, len(rows))}; equivalent in {at_most(equal, len(rows))}; "
    found += f"load {min(loads):.1f} to {max(loads):.1f}"
    return found, slower >= least * len(rows) and equal == 0


def _identical(rows: Sequence[Row]) -> tuple[str, bool]:
    slower = _count(rows, "slower")
    return f"slower in {at_most(slower, len(rows))}; equal in {_count(rows, 'equivalent')}", slower == 0


def _covered(rows: Sequence[Row]) -> tuple[str, bool]:
    """Judge the coverage of the true ratio by printed intervals, among the comparisons that have one."""
    known = [row for row in rows if row["verdict"] != "none" and row["high"] < math.inf]
    inside = sum(row["low"] <= 1 + row["share"] <= row["high"] for row in known)
    words = f"the interval covers the true ratio in {at_least(inside, len(known))}; {len(rows)} sessions"
    return words, bool(known) and inside >= COVERAGE[0] * len(known)


def _neighbours(rows: Sequence[Row]) -> tuple[str, bool]:
    near = [abs(row["off"]) <= NEAR for row in rows]
    warned = [row["is_warned"] == 1.0 and row["verdict"] not in {"slower", "faster", "equivalent"} for row in rows]
    neither = sum(not one and not other for one, other in zip(near, warned, strict=True))
    words = f"within {NEAR:.0%} {sum(near)}, a warning and no verdict {sum(warned)}"
    return f"{words}; neither in {at_most(neither, len(rows))}", neither == 0


def _honest(rows: Sequence[Row]) -> tuple[str, bool]:
    without = [row["status"] for row in rows if row["status"] != "ok"]
    words = f": {', '.join(sorted(set(without)))}" if without else ""
    return f"no time in {at_most(len(without), len(rows))}{words}", not without


def _quick(rows: Sequence[Row]) -> tuple[str, bool]:
    truth = sessions.true_ratios(rows)
    decided = {"beyond 1.2": (1.2, math.inf, 1.0), "1.1 to 1.2": (1.1, 1.2, 0.9)}
    words, passes = [], True
    for name, (low, high, share) in decided.items():
        own = [row for row in rows if math.log(low) <= abs(truth[row["cell"]]) < math.log(high)]
        right = sum(row["verdict"] == ("slower" if truth[row["cell"]] > 0 else "faster") for row in own)
        words.append(f"{name}: {at_least(right, len(own))}")
        passes &= right >= share * len(own)
    close = [row for row in rows if abs(truth[row["cell"]]) <= math.log1p(CLOSE)]
    equal = _count(close, "equivalent")
    words.append(f"equal of those within 3 %: {at_least(equal, len(close))}")
    longest = max(row["elapsed_s"] for row in rows)
    return f"{'; '.join(words)}; {longest:.0f} s at most", passes and equal >= EQUAL * len(close)


def _by_tool(rows: Sequence[Row], key: str) -> dict[str, dict[str, list[float]]]:
    """Group the numbers of each tool by its statistics or rules."""
    grouped: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if key in row:
            grouped[row["tool"]][row[key]].append(row["log" if key == "statistic" else "alarms"])
    return grouped


def _against_rivals(rows: Sequence[Row], *, is_planted: bool) -> tuple[str, bool]:
    """Compare with rivals: closest to equal on the same code, at most 5 % false alarms, 95 % of slowdowns found."""
    words, passes, rules, bound = [], True, _by_tool(rows, "rule"), at_least if is_planted else at_most
    if not is_planted:
        errors = {
            tool: min(math.sqrt(mean(log**2 for log in logs)) for logs in own.values())
            for tool, own in _by_tool(rows, "statistic").items()
        }
        passes = errors[OURS] <= min(errors.values())
        words = [f"RMS {error:.2%} {tool}" for tool, error in errors.items()]
    for tool, own in sorted(rules.items(), key=lambda item: item[0] != OURS):
        counts = [f"{bound(int(sum(alarms)), len(alarms))} by {rule}" for rule, alarms in own.items()]
        words.append(f"{tool}: {', '.join(counts)}")
    (alarms,) = rules[OURS].values()
    share = sum(alarms) / len(alarms)
    return f"{'found' if is_planted else 'alarms'}: {'; '.join(words)}", passes and (
        share >= 1 - FALSE if is_planted else share <= FALSE
    )


def _identical_code() -> Iterator[Test]:
    """V1: both sides are the same code."""
    for (name, is_same), busy in itertools.product({"one file": True, "two files": False}.items(), (0, 1)):
        yield Test(
            id=f"V1 {name}, {busy} busy",
            title=f"identical code, {name}, 2 threads, next to {busy} busy processes, 8 s",
            limit="settings equal in all; false verdicts in 5 % at most",
            number=75,
            seconds=11,
            take=partial(
                _one, sessions.compare, share=0.0, budget_s=8.0, num_threads=2, is_same_file=is_same, num_busy=busy
            ),
            judge=_same,
        )


def _false_shares() -> Iterator[Test]:
    """V2 and V3: shares of simulated sessions, and of real intervals."""
    low, high = COVERAGE
    yield Test(
        id="V2",
        title="simulated sessions without any difference",
        limit=f"99 % limit of sessions with a false verdict at most {method.LARGEST_FALSE:.0%}",
        number=20,
        seconds=2,
        take=partial(method.rows, method.NULLS),
        judge=method.judge_alarms,
    )
    yield Test(
        id="V2 slowdown",
        title="simulated slowdowns of 3 %",
        limit=f"found in {method.POWER:.0%} at least, called equal in {method.LARGEST_EQUAL:.0%} at most (99 % limit)",
        number=10,
        seconds=0.1,
        take=partial(method.rows, method.SLOWDOWNS),
        judge=method.judge_power,
    )
    yield Test(
        id="V3 simulated",
        title="coverage of one watched comparison by its intervals at all looks",
        limit=f"{low:.0%} to {high:.0%} in each world",
        number=2,
        seconds=1,
        take=partial(method.rows, method.ONE_CELL, num_runs=5000),
        judge=method.judge_coverage,
    )
    for share in (0.0, 0.03):
        yield Test(
            id=f"V3 real, {share:.0%}",
            title=f"coverage of the printed interval in real sessions, a planted slowdown of {share:.0%}, 8 s",
            limit=f"{low:.0%} at least",
            number=40,
            seconds=10,
            take=partial(_one, sessions.compare, share=share, budget_s=8.0, num_threads=1),
            judge=_covered,
        )


def _planted_slowdowns() -> Iterator[Test]:
    """V4 and V6: a planted slowdown is found, and identical files are never slower."""
    most = "slower in {} % at least, equivalent in none"
    for busy, share in itertools.product((1, 3), (0.03, 0.0)):
        what = "a planted slowdown of 3 %" if share else "identical files"
        yield Test(
            id=f"V4 {'slower' if share else 'same'}, {busy} busy",
            title=f"{what}, one thread, next to {busy} busy processes, 30 s",
            limit=most.format(80) if share else "slower in none",
            number=40,
            seconds=33,
            take=partial(_one, sessions.compare, share=share, budget_s=30.0, num_threads=1, num_busy=busy),
            judge=partial(_planted, least=0.8) if share else _identical,
        )
    for share in (0.01, 0.0):
        yield Test(
            id=f"V6 {'slower' if share else 'same'}",
            title=f"{f'a planted slowdown of {share:.0%}' if share else 'identical files'}, margin 0.5 %, 60 s",
            limit=most.format(90) if share else "slower in none",
            number=20 if share else 100,
            seconds=62,
            take=partial(_one, sessions.compare, share=share, budget_s=60.0, smallest_effect=0.005),
            judge=partial(_planted, least=0.9) if share else _identical,
        )


def _tables() -> Iterator[Test]:
    """V5: the answers of whole tables."""
    yield Test(
        id="V5",
        title="the quick sweep, right decisions by the true ratio (the median of all sessions)",
        limit="all beyond 1.2, 90 % of 1.1 to 1.2, 70 % of those within 3 % equal, 240 s",
        number=4,
        seconds=260,
        take=sessions.sweep,
        judge=_quick,
    )
    yield Test(
        id="V5 simulated",
        title=f"simulated tables of 120 comparisons, 16 processes, margin {method.MARGIN:.1%}",
        limit=f"99 % limit of false differences among the named at most {FALSE:.0%}",
        number=20,
        seconds=0.1,
        take=method.tables,
        judge=method.judge_tables,
    )


def _tools_and_times() -> Iterator[Test]:
    """V7 and V8: other tools on the same code, and the time of a plain loop."""
    for name, share in (("slower", 0.05), ("same", 0.0)):
        yield Test(
            id=f"V7 {name}",
            title=f"{f'a slowdown of {share:.0%}' if share else 'identical code'} by every tool, {BUDGET_S:g} s each",
            limit="found in 95 %" if share else "nearer to equal than every rival's best statistic; 5 % alarm",
            number=20,
            seconds=47,
            take=partial(sessions.rivals, share=share, budget_s=BUDGET_S),
            judge=partial(_against_rivals, is_planted=bool(share)),
        )
    for threads, length in itertools.product((1, 2), (32, 128, 512, 1024)):
        yield Test(
            id=f"V8 {threads} threads, T={length}",
            title=f"sdpa, fused and a function by attnbench and by a plain loop, {threads} threads, T={length}",
            limit=f"within {absolute.MEDIAN_LIMIT:.0%} in the median, no reading beyond {absolute.LIMIT:.0%}",
            number=5,
            seconds=45,
            take=partial(absolute.session, num_threads=threads, seq_len=length),
            judge=absolute.judge,
        )


def _next_to_others() -> Iterator[Test]:
    """V9: other work on the machine never becomes a false time or a finding."""
    for busy, threads, by_fixture in itertools.product((1, 2), (1, 2), (False, True)):
        how = "fixture" if by_fixture else "run"
        yield Test(
            id=f"V9 {busy} busy, {threads} threads, {how}",
            title=f"the time by {how} next to {busy} busy processes, {threads} threads",
            limit="within 10 % of the quiet one, or a warning and no verdict",
            number=5,
            seconds=15,
            take=partial(_one, sessions.neighbour, num_busy=busy, num_threads=threads, by_fixture=by_fixture),
            judge=_neighbours,
        )
    yield Test(
        id="V9 honest",
        title="an honest function next to 3 busy processes, 1.5 s",
        limit="a time in all, doubtful or not",
        number=40,
        seconds=7,
        take=partial(_one, sessions.honest, num_busy=3),
        judge=_honest,
    )


GROUPS = (_identical_code, _false_shares, _planted_slowdowns, _tables, _tools_and_times, _next_to_others)
TESTS = {test.id: test for group in GROUPS for test in group()}
"""All tests, with the numbers of sessions that their limits need."""


def chosen(names: Sequence[str]) -> list[Test]:
    """Select the tests whose id begins with one of `names`; all if there are none.

    Raises:
        BadParameter: no test begins with a name.
    """
    for name in names:
        if not any(test.startswith(name) for test in TESTS):
            raise typer.BadParameter(f"{name}: choose among {'; '.join(TESTS)}")
    return [test for test in TESTS.values() if not names or test.id.startswith(tuple(names))]


def pieces(test: Test, old: Path | None = None) -> list[frame.Piece]:
    """The sessions of a test as pieces of the study; those of an older tree have a piece of their own."""
    found = [frame.Piece(name=test.id, make=test.take, size=test.number)]
    if old is not None and test.id.startswith(WITH_OLD):
        make = partial(test.take, tree=old.resolve() / "harness")
        found.append(frame.Piece(name=test.id + OLD, make=make, size=test.number))
    return found


def outcome(test: Test, folder: Path, engine: str = "") -> Outcome | None:
    """Judge a test by its sessions, with engine=OLD by those of the older tree; None without any."""
    if not (rows := frame.rows(folder, test.id + engine)):
        return None
    found, passes = test.judge(rows)
    return Outcome(id=test.id + engine, title=test.title, limit=test.limit, found=found, passes=passes)


def table(folder: Path) -> str:
    """Build the table of all outcomes so far."""
    judged = [found for test in TESTS.values() for engine in ("", OLD) if (found := outcome(test, folder, engine))]
    rows = [
        {"test": each.id, "what": each.title, "limit": each.limit, "found": each.found, "result": each.word}
        for each in judged
    ]
    return markdown_table(rows)


def page(folder: Path, machine: str) -> str:
    """Build the page with the table of all outcomes so far."""
    return f"""# Does the method hold what it promises?

Written by `python -m studies.acceptance` on {machine}. Limits were fixed before the sessions; what misses one
is a MISS. Shares are printed with the end of their one-sided 95 % interval.

Not run: {"; ".join(test.id for test in TESTS.values() if not frame.rows(folder, test.id)) or "none"}.

{table(folder)}
"""


def costs(tests: Sequence[Test], folder: Path, number: int, old: Path | None) -> str:
    """Build the table of missing sessions, with the minutes that they take."""
    rows, total = [], 0.0
    for test in tests:
        wanted = min(number or test.number, test.number)
        missing = sum(max(0, wanted - frame.done(folder, piece.name)) for piece in pieces(test, old))
        total += missing * test.seconds / 60
        cells = {"sessions to run": str(missing), "minutes": f"{missing * test.seconds / 60:.1f}"}
        rows.append({"test": test.id, "what": test.title, **cells})
    return f"{markdown_table(rows)}\n{total:.0f} minutes in all, on two idle cores."


def machine() -> str:
    """Describe processor, cores and versions in a few words."""
    from attnbench.devices import environment

    found = environment.collect()
    versions = f"Python {platform.python_version()}, torch {found.versions.get('torch', '?')}"
    return f"{found.cpu}, {found.num_physical_cores} cores, {versions}"


def accept(
    tests: Annotated[list[str] | None, typer.Argument(help="Beginnings of names. Default: all.")] = None,
    *,
    number: Annotated[int, typer.Option("--sessions", help="Most of each test; 0: the number that it needs.")] = 0,
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes; sessions are kept there.")] = FOLDER,
    old: Annotated[
        Path | None, typer.Option(metavar="TREE", help=f"A checkout of an older commit: {', '.join(WITH_OLD)} use it.")
    ] = None,
    only_list: Annotated[
        bool, typer.Option("--list", help="Print the table, and the minutes of missing sessions; run nothing.")
    ] = False,
) -> None:
    """Run sessions with a known truth, and print the table of all tests so far. Exit code 1 if one of these misses.

    Sessions that are already stored are not run again. The older tree is one of `git worktree add TREE COMMIT`; its
    sessions alternate with those of this one.
    """
    asked = chosen(tests or [])
    if only_list:
        typer.echo(f"{table(to)}\n\n{costs(asked, to, number, old)}")
        return
    for test in asked:
        frame.complete(pieces(test, old), to, number)
        frame.save(to / "acceptance.md", page(to, machine()))
        typer.echo(str(outcome(test, to)))
    typer.echo(table(to))
    if not all(found.passes for test in asked if (found := outcome(test, to))):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(accept)
