"""`python -m studies.acceptance V1 V4`: run real sessions with a known truth, and tabulate the results.

Each session is stored when it ends, so that an interrupted study can be resumed. `--old PYTHON` also runs the attnbench
of another environment, alternating session by session on the same machine. V2, V3 and V5's simulation are in
studies/acceptance/method.py, V8 in absolute.py, G1 to G5 in on_cuda.py.
"""

import json
import math
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from attnbench.units import markdown_table
from studies.acceptance import sessions
from studies.acceptance.outcome import Outcome, Row, at_least, at_most
from studies.acceptance.sessions import Engine

FOLDER = Path("results/gallery/acceptance")
FALSE, NEAR, CLOSE, EQUAL = 0.05, 0.1, 0.03, 0.7
"""Limits: false verdicts (share), error of a time, width of "the same time" (both relative), and the share of equal
comparisons that must be called equal."""
BUDGET_S, OURS = 10.0, "attnbench"
Take = Callable[[Engine, int], list[Row]]
Judge = Callable[[Sequence[Row]], tuple[str, bool]]


@dataclass(frozen=True, kw_only=True)
class Test:
    """One acceptance test: how to run a session, the number of sessions, and how to judge their rows."""

    id: str
    title: str
    limit: str
    number: int  # number of sessions
    take: Take
    judge: Judge


def _one(take: Callable[..., Row], **settings: float | bool) -> Take:
    return lambda engine, number: [take(engine, number, **settings)]


def _rivals(engine: Engine, number: int, *, share: float) -> list[Row]:
    return sessions.rivals(engine, number, share=share, budget_s=BUDGET_S)


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
    loads = [float(row["load"]) for row in rows]
    found = f"slower in {at_least(slower, len(rows))}; equivalent in {at_most(equal, len(rows))}; "
    found += f"load {min(loads):.1f} to {max(loads):.1f}"
    return found, slower >= least * len(rows) and equal == 0


def _identical(rows: Sequence[Row]) -> tuple[str, bool]:
    slower = _count(rows, "slower")
    return f"slower in {at_most(slower, len(rows))}; equal in {_count(rows, 'equivalent')}", slower == 0


def _neighbours(rows: Sequence[Row]) -> tuple[str, bool]:
    near = [abs(float(row["off"])) <= NEAR for row in rows]
    warned = [row["is_warned"] == 1.0 and row["verdict"] in {"undecided", "None"} for row in rows]
    neither = sum(not one and not other for one, other in zip(near, warned, strict=True))
    words = f"within {NEAR:.0%} {sum(near)}, a warning and no verdict {sum(warned)}"
    return f"{words}; neither in {at_most(neither, len(rows))}", neither == 0


def _honest(rows: Sequence[Row]) -> tuple[str, bool]:
    without = [str(row["status"]) for row in rows if row["status"] != "ok"]
    words = f": {', '.join(sorted(set(without)))}" if without else ""
    return f"no time in {at_most(len(without), len(rows))}{words}", not without


def _quick(rows: Sequence[Row]) -> tuple[str, bool]:
    truth = sessions.true_ratios(rows)
    decided = {"beyond 1.2": (1.2, math.inf, 1.0), "1.1 to 1.2": (1.1, 1.2, 0.9)}
    words, passes = [], True
    for name, (low, high, share) in decided.items():
        own = [row for row in rows if math.log(low) <= abs(truth[str(row["cell"])]) < math.log(high)]
        right = sum(row["verdict"] == ("slower" if truth[str(row["cell"])] > 0 else "faster") for row in own)
        words.append(f"{name}: {at_least(right, len(own))}")
        passes &= right >= share * len(own)
    close = [row for row in rows if abs(truth[str(row["cell"])]) <= math.log1p(CLOSE)]
    equal = _count(close, "equivalent")
    words.append(f"equal of those within 3 %: {at_least(equal, len(close))}")
    longest = max(float(row["elapsed_s"]) for row in rows)
    return f"{'; '.join(words)}; {longest:.0f} s at most", passes and equal >= EQUAL * len(close)


def _by_tool(rows: Sequence[Row], key: str) -> dict[str, dict[str, list[float]]]:
    """Group the numbers of each tool by its statistics or rules."""
    made: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if key in row:
            made[str(row["tool"])][str(row[key])].append(float(row["log" if key == "statistic" else "alarms"]))
    return made


def _against_rivals(rows: Sequence[Row], *, is_planted: bool) -> tuple[str, bool]:
    """Compare with rivals: closest to equal on the same code, at most 5 % false alarms, 95 % of slowdowns found."""
    words, passes, rules = [], True, _by_tool(rows, "rule")
    if not is_planted:
        errors = {
            tool: min(math.sqrt(mean(log**2 for log in logs)) for logs in own.values())
            for tool, own in _by_tool(rows, "statistic").items()
        }
        passes = errors[OURS] <= min(errors.values())
        words = [f"RMS {error:.2%} {tool}" for tool, error in errors.items()]
    for tool, own in sorted(rules.items(), key=lambda item: item[0] != OURS):
        counts = [f"{int(sum(alarms))} of {len(alarms)} by {rule}" for rule, alarms in own.items()]
        words.append(f"{tool}: {', '.join(counts)}")
    (alarms,) = rules[OURS].values()
    share = sum(alarms) / len(alarms)
    return f"{'found' if is_planted else 'alarms'}: {'; '.join(words)}", passes and (
        share >= 1 - FALSE if is_planted else share <= FALSE
    )


_MOST = partial(_planted, least=0.8)
TESTS = {
    test.id: test
    for test in (
        *(
            Test(
                id=f"V1 {name}, {busy} busy",
                title=f"identical code, {name}, 2 threads, next to {busy} busy processes, 8 s",
                limit="settings equal in all; false verdicts in 5 % at most",
                number=75,
                take=_one(
                    sessions.compare, share=0.0, budget_s=8.0, num_threads=2, is_same_file=is_same, num_busy=busy
                ),
                judge=_same,
            )
            for name, is_same in (("one file", True), ("two files", False))
            for busy in (0, 1)
        ),
        *(
            Test(
                id=f"V4 {name}, {busy} busy",
                title=f"{what}, one thread, next to {busy} busy processes, 30 s",
                limit=limit,
                number=40,
                take=_one(sessions.compare, share=share, budget_s=30.0, num_threads=1, num_busy=busy),
                judge=judge,
            )
            for busy in (1, 3)
            for name, what, share, limit, judge in (
                ("slower", "a planted slowdown of 3 %", 0.03, "slower in 80 % at least, equivalent in none", _MOST),
                ("same", "identical files", 0.0, "slower in none", _identical),
            )
        ),
        Test(
            id="V5",
            title="the quick sweep, right decisions by the true ratio (the median of all sessions)",
            limit="all beyond 1.2, 90 % of 1.1 to 1.2, 70 % of those within 3 % equal",
            number=4,
            take=sessions.sweep,
            judge=_quick,
        ),
        Test(
            id="V6 slower",
            title="a planted slowdown of 1 %, margin 0.5 %, 60 s",
            limit="slower in 90 % at least, equivalent in none",
            number=20,
            take=_one(sessions.compare, share=0.01, budget_s=60.0, smallest_effect=0.005),
            judge=partial(_planted, least=0.9),
        ),
        Test(
            id="V6 same",
            title="identical files, margin 0.5 %, 60 s",
            limit="slower in none",
            number=20,
            take=_one(sessions.compare, share=0.0, budget_s=60.0, smallest_effect=0.005),
            judge=_identical,
        ),
        *(
            Test(
                id=f"V7 {name}",
                title=f"{'a slowdown of 5 %' if share else 'identical code'} by every tool, {BUDGET_S:g} s each",
                limit="found in 95 %" if share else "nearer to equal than every rival's best statistic; 5 % alarm",
                number=20,
                take=partial(_rivals, share=share),
                judge=partial(_against_rivals, is_planted=bool(share)),
            )
            for name, share in (("slower", 0.05), ("same", 0.0))
        ),
        *(
            Test(
                id=f"V9 {busy} busy, {threads} threads, {'fixture' if by_fixture else 'run'}",
                title=f"{'the fixture' if by_fixture else 'run'} next to {busy} busy processes, {threads} threads",
                limit="within 10 % of the quiet one, or a warning and no verdict",
                number=5,
                take=_one(sessions.neighbour, num_busy=busy, num_threads=threads, by_fixture=by_fixture),
                judge=_neighbours,
            )
            for busy in (1, 2)
            for threads in (1, 2)
            for by_fixture in (False, True)
        ),
        Test(
            id="V9 honest",
            title="an honest function next to 3 busy processes, 1.5 s",
            limit="a time in all, doubtful or not",
            number=40,
            take=_one(sessions.honest, num_busy=3),
            judge=_honest,
        ),
    )
}


def chosen(names: Sequence[str]) -> list[Test]:
    """Select the tests whose id begins with one of `names`; all if there are none.

    Raises:
        BadParameter: no test begins with a name.
    """
    for name in names:
        if not any(test.startswith(name) for test in TESTS):
            raise typer.BadParameter(f"{name}: choose among {', '.join(TESTS)}")
    return [test for test in TESTS.values() if not names or test.id.startswith(tuple(names))]


def kept(folder: Path, test: Test, label: str) -> Path:
    """Return the file with the rows of a test's sessions."""
    return folder / "parts" / f"{re.sub('[^a-z0-9]+', '-', test.id.lower())}-{label}.jsonl"


def rows_of(path: Path) -> list[Row]:
    """Read the stored rows, except for a truncated line."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [row for line in lines for row in json.loads(line)]


def keep(path: Path, taken: list[Row]) -> None:
    """Append the rows of a session, all or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = before[: before.rfind("\n") + 1]  # drops a truncated line
    draft = path.with_suffix(".draft")
    draft.write_text(whole + json.dumps(taken) + "\n", encoding="utf-8")
    draft.replace(path)


def take(test: Test, engines: dict[str, Engine], folder: Path, number: int) -> None:
    """Run the missing sessions, alternating between engines."""
    paths = {label: kept(folder, test, label) for label in engines}
    for session in range(number):
        for label, engine in engines.items():
            done = len({row["session"] for row in rows_of(paths[label])})
            if done <= session:
                taken = [{**row, "session": float(session)} for row in test.take(engine, session)]
                keep(paths[label], taken)
                told = {name: row for name, row in taken[0].items() if name != "cell"}
                print(f"{test.id}, {label}, {session + 1} of {number}: {told}", file=sys.stderr, flush=True)  # noqa: T201


def outcomes(folder: Path, label: str) -> Iterator[Outcome]:
    """Judge each test that has sessions."""
    for test in TESTS.values():
        if rows := rows_of(kept(folder, test, label)):
            found, passes = test.judge(rows)
            yield Outcome(id=test.id, title=test.title, limit=test.limit, found=found, passes=passes)


def page(folder: Path, machine: str) -> str:
    """Build the table of all outcomes so far, next to the other engine."""
    before = {each.id: each.found for each in outcomes(folder, "old")}
    table = [
        {
            "test": each.id,
            "what": each.title,
            "limit": each.limit,
            "found": each.found,
            "by the engine before": before.get(each.id, "not run"),
            "result": "pass" if each.passes else "MISS",
        }
        for each in outcomes(folder, "new")
    ]
    absent = [test.id for test in TESTS.values() if not rows_of(kept(folder, test, "new"))]
    return f"""# Does the method hold what it promises?

Written by `python -m studies.acceptance` on {machine}. Limits were fixed before the sessions; what misses one
is a MISS. Shares are printed with the end of their one-sided 95 % interval. [Simulated worlds](method.md) are V2, V3.

Not run: {", ".join(absent) or "none"}.

{markdown_table(table)}
"""


def folder_of(accelerator: str) -> Path:
    """Return the folder of the table: each accelerator has its own, next to that of machines without one."""
    name = "-".join(re.findall(r"[a-z0-9]+", accelerator.partition(",")[0].lower()))
    folder = FOLDER
    return folder.with_name(f"{folder.name}-on-{name}") if name else folder


def machine() -> str:
    """Describe processor, cores and versions in a few words."""
    from attnbench.devices import environment

    found = environment.collect()
    versions = f"Python {platform.python_version()}, torch {found.versions.get('torch', '?')}"
    return f"{found.cpu}, {found.num_physical_cores} cores, {versions}"


def accept(
    tests: Annotated[list[str] | None, typer.Argument(help="Beginnings of names. Default: all.")] = None,
    *,
    number: Annotated[int, typer.Option("--sessions", help="Of each test; 0: as many as its limit asks for.")] = 0,
    old: Annotated[str, typer.Option(metavar="PYTHON", help="An interpreter with an earlier attnbench.")] = "",
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the table goes; sessions are kept there.")
    ] = None,
) -> None:
    """Run real sessions with a known truth, and write the table. Exit code 1 if a limit is missed."""
    from attnbench.devices import device

    to = to or folder_of(device("cuda").facts().accelerator)
    engines = {"new": Engine.of("")} | ({"old": Engine.of(old)} if old else {})
    wanted = chosen(tests or [])
    for test in wanted:
        take(test, engines, to, number or test.number)
        (to / "acceptance.md").write_text(page(to, machine()), encoding="utf-8")
    missed = [each.id for each in outcomes(to, "new") if not each.passes]
    typer.echo(f"missed: {', '.join(missed) or 'none'}; written to {to}")
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(accept)
