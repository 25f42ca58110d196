"""Test what attnbench promises about its times and verdicts: `python -m studies.acceptance W1 V4 --sessions 5`.

The tests are W1 to W7, V1 to V4, V6 and V9. `--list` prints what each one tests, and the minutes that its missing
sessions take. Most sessions run attnbench on functions whose true difference in speed is known; those of V2, and some
of V3, are simulated. Each session is stored when it ends, so that an interrupted study can be resumed. `--old TREE`
also runs an older attnbench from a checkout, alternating with this one. The tests of CUDA devices, G1 to G5, are in
on_cuda.py.
"""

import itertools
import math
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import typer

from attnbench.units import markdown_table
from studies import frame
from studies.acceptance import method, printed, sessions
from studies.acceptance.method import COVERAGE
from studies.acceptance.outcome import Outcome, at_least, at_most
from studies.acceptance.rivals import LOOP, OURS
from studies.acceptance.sessions import NEVER, PRODUCT
from studies.frame import Row
from studies.trust import __main__ as cheats

FOLDER = Path("results/gallery/acceptance")
FALSE, NEAR = 0.05, 0.1
"""Limits: the share of false verdicts, and the relative error of a time measured while other programs run."""
ERROR_OF_LOOP = 1.2
"""Largest RMS error of a ratio, as a multiple of the error that the plain loop makes in the same time."""
SHARES = {10.0: 0.5, 30.0: 0.6, 240.0: 0.7}
"""Smallest share of a run's time that must be spent in samples, by the budget of the run in seconds."""
WITH_OLD, OLD = ("W1", "W2", "W4", "W5"), ", older"
"""Tests that `--old` runs with the older attnbench, too, and the suffix of the names of these runs."""
Take = Callable[..., Sequence[Row]]
"""Function that runs one session, given its number, and returns its rows; in tests of WITH_OLD it also takes `tree`."""
Judge = Callable[[Sequence[Row]], tuple[str, bool]]


@dataclass(frozen=True, kw_only=True)
class Test:
    """One acceptance test: how to run a session, the number of sessions, and how to judge their rows."""

    id: str
    title: str
    limit: str
    number: int  # number of sessions
    seconds: float  # duration of one session on two cores
    take: Take
    judge: Judge


def _one(take: Callable[..., Row], number: int, **settings: float | bool | str | Path) -> list[Row]:
    return [take(number, **settings)]


def _count(rows: Sequence[Row], *verdicts: str) -> int:
    return sum(row["verdict"] in verdicts for row in rows)


def _same(rows: Sequence[Row]) -> tuple[str, bool]:
    """Judge sessions of identical code: numbers of calls must match, and at most a share FALSE of verdicts be false."""
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


def _against_loop(rows: Sequence[Row]) -> tuple[str, bool]:
    """Judge sessions with a planted slowdown. Its true size is the median of the ratios that plain loops measured."""
    truth = median(row["loop"] for row in rows)
    words, is_found = _planted(rows, least=1 - FALSE)
    covered, is_covered = _covered([row | {"share": truth - 1} for row in rows])
    ratios = ", ".join(f"{each:.3f}" for each in sorted(row["loop"] for row in rows))
    return f"{words}; plain loops {ratios}; {covered}", is_found and is_covered


def _identical(rows: Sequence[Row], least_equal: float = 0.0) -> tuple[str, bool]:
    """Judge identical files: none may be slower; if `least_equal` > 0, none faster, and at least that share equal."""
    equal = _count(rows, "equivalent")
    false = _count(rows, "slower", *["faster"] * bool(least_equal))
    words = (
        f"{'false' if least_equal else 'slower'} in {at_most(false, len(rows))}; equal in {at_least(equal, len(rows))}"
    )
    return words, false == 0 and equal >= least_equal * len(rows)


def _covered(rows: Sequence[Row]) -> tuple[str, bool]:
    """Judge how many printed intervals contain the true ratio, among the comparisons that have an interval."""
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
    without = [f"{row['kind']} {row['status']}" for row in rows if row["status"] != "ok"]
    words = f": {', '.join(sorted(set(without)))}" if without else ""
    kinds = len({row["kind"] for row in rows})
    return f"no time in {at_most(len(without), len(rows))}{words}; {kinds} kinds", not without


def _errors(rows: Sequence[Row]) -> tuple[str, bool]:
    """Compare the RMS error of attnbench's ratios with that of the plain loop and of each tool's best statistic."""
    logs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        logs[row["tool"]][row["statistic"]].append(row["log"])
    errors = {
        tool: min(math.sqrt(mean(log**2 for log in each)) for each in found.values()) for tool, found in logs.items()
    }
    own, others = errors[OURS], [error for tool, error in errors.items() if tool not in {OURS, LOOP}]
    passes = own <= ERROR_OF_LOOP * errors.get(LOOP, 0.0) and all(own < error for error in others)
    return ", ".join(f"{tool} {error:.2%}" for tool, error in sorted(errors.items(), key=lambda each: each[1])), passes


def _spending(rows: Sequence[Row], least: float) -> tuple[str, bool]:
    """Judge the share of a run's time that is spent in samples (median); the text has the share of each part."""
    known = [row for row in rows if "spent" in row]
    if not known:
        return "no session ended", False
    run = median(row["spent"]["samples"] / row["spent"]["run"] for row in known)
    command = median(row["spent"]["samples"] / row["command_s"] for row in known)
    timing = median(row["spent"]["samples"] / row["spent"]["timing"] for row in known)
    parts = {
        name: median(row["spent"][name] / row["spent"]["run"] for row in known)
        for name in known[0]["spent"]
        if name not in {"samples", "run", "timing"}
    }
    others = ", ".join(f"{name} {share:.0%}" for name, share in parts.items())
    words = f"{run:.0%} of the run, {command:.0%} of the command, {timing:.0%} from the first sample on; {others}"
    return words, run >= least


def _printed_times() -> Iterator[Test]:
    """Yield the tests W1: attnbench prints the time that a plain loop measures."""
    for threads, length in itertools.product((1, 2), (32, 128, 256, 512, 1024)):
        yield Test(
            id=f"W1 {threads} threads, T={length}",
            title=f"time of sdpa, fused and a user's function, {threads} threads, T={length}, and of a plain loop",
            limit=f"within {printed.MEDIAN_LIMIT:.0%} in the median, no reading beyond {printed.LIMIT:.0%}",
            number=5,
            seconds=75,
            take=partial(printed.session, num_threads=threads, seq_len=length),
            judge=printed.judge,
        )


def _budgets() -> Iterator[Test]:
    """Yield the tests W2 to W5: verdicts, errors and use of time in sessions whose budget is given in seconds."""
    yield Test(
        id="W2",
        title="an extra product of about 3 % of 0.5 ms, 2 threads, 5 s",
        limit=f"slower in 95 %, equivalent in none; the interval covers the plain loops' ratio in {COVERAGE[0]:.0%}",
        number=40,
        seconds=19,
        take=partial(_one, sessions.compare, code=PRODUCT, share=0.03, budget_s=5.0, num_threads=2, loop_s=3.0),
        judge=_against_loop,
    )
    yield Test(
        id="W3",
        title="identical files, 2 threads, 5 s",
        limit="equal in 95 %, false in none",
        number=60,
        seconds=9,
        take=partial(_one, sessions.compare, code=PRODUCT, budget_s=5.0, num_threads=2),
        judge=partial(_identical, least_equal=1 - FALSE),
    )
    for budget_s in (5.0, 10.0, 30.0):
        yield Test(
            id=f"W4 {budget_s:g} s",
            title=f"RMS error of the ratio of identical code by each tool in {budget_s:g} s",
            limit=f"at most {ERROR_OF_LOOP:g} times the plain loop's, smaller than all others'",
            number=20,
            seconds=5 * budget_s + 10,
            take=partial(sessions.rivals, budget_s=budget_s),
            judge=_errors,
        )
    for budget_s, least in SHARES.items():
        yield Test(
            id=f"W5 {budget_s:g} s",
            title=f"the share of samples in {budget_s:g} s of compare",
            limit=f"{least:.0%} of the run at least",
            number=3,
            seconds=budget_s + 4,
            take=partial(_one, sessions.compare, code=PRODUCT, budget_s=budget_s, smallest_effect=NEVER, num_threads=2),
            judge=partial(_spending, least=least),
        )


def _trust() -> Iterator[Test]:
    """Yield the tests W6 and W7: honest code always gets a time, and cheats get no false time."""
    for busy in (0, 3):
        yield Test(
            id=f"W6 {busy} busy",
            title=f"short runs of {sessions.NUM_KINDS} kinds of honest functions next to {busy} busy processes, 1.5 s",
            limit="a time in all",
            number=50,
            seconds=7 + busy,
            take=partial(_one, sessions.honest, num_busy=busy),
            judge=_honest,
        )
    yield Test(
        id=cheats.NAME,
        title="cheats and contaminations under --referee",
        limit="no false time, no affected bystander",
        number=len(cheats.CASES),
        seconds=15,
        take=cheats.take,
        judge=cheats.judge,
    )


def _identical_code() -> Iterator[Test]:
    """Yield the tests V1: both compared functions are the same code."""
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
    """Yield the tests V2 and V3: shares of false verdicts, found slowdowns, and intervals that cover the true ratio."""
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
    """Yield the tests V4 and V6: a planted slowdown is found, and identical files are never slower."""
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


def _next_to_others() -> Iterator[Test]:
    """Yield the tests V9: other work on the machine never leads to a false time or a finding."""
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


GROUPS = (_printed_times, _budgets, _trust, _identical_code, _false_shares, _planted_slowdowns, _next_to_others)
TESTS = {test.id: test for group in GROUPS for test in group()}
"""All tests by id; each has the number of sessions that its limit needs."""


def chosen(names: Sequence[str]) -> list[Test]:
    """Select the tests whose id begins with one of `names`; all tests if `names` is empty.

    Raises:
        BadParameter: no id begins with a name.
    """
    for name in names:
        if not any(test.startswith(name) for test in TESTS):
            raise typer.BadParameter(f"{name}: choose among {'; '.join(TESTS)}")
    return [test for test in TESTS.values() if not names or test.id.startswith(tuple(names))]


def pieces(test: Test, old: Path | None = None) -> list[frame.Piece]:
    """Return the sessions of a test as a piece of the study; with `old`, also those that run this older checkout.

    Only the tests in WITH_OLD have sessions of the second kind.
    """
    found = [frame.Piece(name=test.id, make=test.take, size=test.number)]
    if old is not None and test.id.startswith(WITH_OLD):
        make = partial(test.take, tree=old.resolve() / "harness")
        found.append(frame.Piece(name=test.id + OLD, make=make, size=test.number))
    return found


def outcome(test: Test, folder: Path, engine: str = "") -> Outcome | None:
    """Judge a test by its stored sessions (of the older tree if `engine` is OLD); return None if there are none."""
    if not (rows := frame.rows(folder, test.id + engine)):
        return None
    if engine:  # other tools are measured in the sessions of this tree alone
        rows += [row for row in frame.rows(folder, test.id) if row.get("tool", OURS) != OURS]
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
    """Build the table of the sessions that are not stored yet, with the minutes that they take."""
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
    """Run sessions with a known truth, and print the table of all tests so far. Exit code 1 if a selected test misses.

    Sessions that are already stored are not run again. `git worktree add TREE COMMIT` makes an older tree; its sessions
    alternate with those of this tree.
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
