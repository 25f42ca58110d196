"""`python -m harness.acceptance`: every test, one after another; table and pictures. What is stopped goes on."""

import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from harness.acceptance import suite
from harness.acceptance.outcome import Outcome
from harness.acceptance.plan import ON_CUDA, sizes


class Part(StrEnum):
    """What is tested."""

    method = "method"
    gate = "gate"


FOLDERS = {Part.method: Path("results/gallery/acceptance"), Part.gate: Path("results/gallery/acceptance-gate")}


def accept(
    what: Annotated[Part, typer.Argument(help="The method, or sessions of two revisions.")] = Part.method,
    *,
    short: Annotated[bool, typer.Option("--short", help="Fewer repetitions: about 15 minutes.")] = False,
    only: Annotated[str, typer.Option(metavar="T1,T5", help="These tests alone.")] = "",
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Where table and pictures go.")] = None,
) -> None:
    """Show what the method must show, beside its rivals. Exit code 1 where something is missed."""
    to = to or FOLDERS[what]
    whole = suite.GATE if what is Part.gate else suite.TESTS
    able = [*whole, *(ON_CUDA if what is Part.method and suite.has_cuda() else ())]
    asked = [test for test in only.split(",") if test]
    if unknown := set(asked) - set(able):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose among {', '.join(able)}")
    tests = [test for test in able if test in asked] or able
    folder = to / "parts" / ("short" if short else "full")
    folder.mkdir(parents=True, exist_ok=True)
    (to / "parts" / ".gitignore").write_text("*\n", encoding="utf-8")
    every = suite.jobs(tests, short=short)
    make_all(every, folder, short=short)
    made = suite.read(folder, every)
    commits = sorted({_short(piece.commit) for pieces in made.values() for piece in pieces})
    outcomes = list(suite.conclude(tests, made, short=short))
    if tests == suite.TESTS:
        outcomes += suite.left_out(short=short)
    told = ", ".join([when(every, folder), f"of {' and '.join(commits)}"])
    write(outcomes, to, short=short, when=told, is_gate=what is Part.gate)
    missed = [each.id for each in outcomes if not each.passes]
    typer.echo(json.dumps({"missed": missed, "written to": str(to), "kept": str(folder)}))
    if missed:
        raise typer.Exit(1)


def _short(commit: str) -> str:
    """A commit as git abbreviates it, with the plus that says that files had changed since."""
    return commit[:7] + "+" * commit.endswith("+")


def make_all(every: Sequence[suite.Job], folder: Path, *, short: bool) -> None:
    """Do the pieces that are not there yet, and tell how long the others will take, from how long these took."""
    todo = [job for job in every if not suite.is_there(job, folder, short=short)]
    if len(todo) < len(every):
        _say(f"{len(every) - len(todo)} of {len(every)} pieces are in {folder} already: delete it to begin anew")
    guess_s = {job: sizes(short=short)[job.test].piece_s for job in todo}
    guessed_s, start = 0.0, time.monotonic()
    for done, job in enumerate(todo):
        spent_s = time.monotonic() - start
        pace = spent_s / guessed_s if guessed_s else 1.0
        left_s = pace * (sum(guess_s.values()) - guessed_s)
        _say(f"{done + 1} of {len(todo)}: {job.name}, about {left_s / 60:.0f} min left")
        if not suite.run(job, folder, short=short):
            _say(f"{job.name} crashed: see {folder / job.name}.log")
        guessed_s += guess_s[job]


def when(every: Sequence[suite.Job], folder: Path) -> str:
    """When the pieces were made: a call keeps those that an earlier one finished."""
    paths = [folder / f"{job.name}.json" for job in every]
    times = sorted(datetime.fromtimestamp(path.stat().st_mtime, UTC) for path in paths if path.exists())
    if not times:
        return ""
    form = "%Y-%m-%d %H:%M"
    return f"the pieces were made from {times[0]:{form}} to {times[-1]:{form}} UTC, in one or several calls"


def write(outcomes: Sequence[Outcome], to: Path, *, short: bool, when: str = "", is_gate: bool = False) -> None:
    """Table, raw rows and pictures."""
    from harness.acceptance import chart, table
    from harness.reports.style import save

    told = table.markdown(outcomes, machine(), short=short, when=when, is_gate=is_gate)
    (to / "acceptance.md").write_text(told, encoding="utf-8")
    options = {"method": "gzip", "mtime": 0}
    table.raw(outcomes).to_csv(to / "acceptance.csv.gz", index=False, compression=options)
    for name, drawn in chart.pictures(outcomes).items():
        save([drawn], to, name)


def machine() -> str:
    """Processor, cores and versions, in a few words."""
    from harness.machine import environment

    found = environment.collect()
    versions = f"Python {platform.python_version()}, torch {found.versions.get('torch', '?')}"
    return f"{found.cpu}, {found.num_physical_cores} cores, {versions}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - progress


if __name__ == "__main__":
    typer.run(accept)
