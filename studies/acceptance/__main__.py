"""`python -m studies.acceptance`: every test, one after another; table and pictures. What is stopped goes on."""

import json
import platform
import re
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from studies.acceptance import kept, suite
from studies.acceptance.outcome import TESTS, Outcome
from studies.acceptance.plan import ON_CUDA, sizes


class Part(StrEnum):
    """What is tested."""

    method = "method"
    gate = "gate"


FOLDERS = {Part.method: Path("results/gallery/acceptance"), Part.gate: Path("results/gallery/acceptance-gate")}


def accept(
    what: Annotated[Part, typer.Argument(help="The method, or sessions of two revisions.")] = Part.method,
    *,
    short: Annotated[bool, typer.Option("--short", help="Fewer repetitions: about 15 minutes.")] = False,
    only: Annotated[str, typer.Option(metavar="power,T6", help="These tests alone; the table keeps the others.")] = "",
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Where table and pictures go.")] = None,
) -> None:
    """Show what the method must show, next to its rivals. Exit code 1 where something is missed."""
    to = to or folder_of(what, accelerator())
    whole = suite.GATE if what is Part.gate else suite.TESTS
    able = [*whole, *(ON_CUDA if what is Part.method and suite.has_cuda() else ())]
    asked = [TESTS.get(test, test) for test in only.split(",") if test]
    if unknown := set(asked) - set(able):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose among {', '.join(able)}")
    if not short and {"aa_error", "false_alarms"} & set(asked):
        asked += ["aa_error", "false_alarms"]  # two readings of the same comparisons
    tests = [test for test in able if test in asked] or able
    here = machine()
    _tell_of_earlier(to, here, short=short)
    folder = to / "parts" / ("short" if short else "full")
    folder.mkdir(parents=True, exist_ok=True)
    (to / "parts" / ".gitignore").write_text("*\n", encoding="utf-8")
    every = suite.jobs(tests, short=short)
    make_all(every, folder, short=short)
    earlier = kept.load(to, machine=here, short=short)  # by now another call may have renewed some
    outcomes = conclude(tests, suite.read(folder, every), earlier, short=short)
    kept.save(outcomes, to, machine=here, short=short)
    write(outcomes, to, here, short=short, is_gate=what is Part.gate)
    missed = [each.test for each in outcomes if each.test in tests and not each.passes]
    typer.echo(json.dumps({"missed": missed, "written to": str(to), "kept": str(folder)}))
    if missed:
        raise typer.Exit(1)


def _tell_of_earlier(to: Path, here: str, *, short: bool) -> None:
    """Before anything runs, what is wrong with what the folder has already."""
    try:
        earlier = kept.load(to, machine=here, short=short)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not earlier and (to / kept.FILE).exists():
        _say(f"what {to / kept.FILE} has is of another machine or form: it will be replaced")


def conclude(
    tests: list[str], made: dict[str, list[suite.Piece]], earlier: dict[str, Outcome], *, short: bool
) -> list[Outcome]:
    """The outcomes of these tests, among those of earlier calls. Some read the rows of T1, too."""
    if "aa_error" in earlier and not {"aa_error", "false_alarms"} & set(tests):
        made = {"aa_error": [suite.Piece(rows=tuple(dict(row) for row in earlier["aa_error"].rows))]} | made
    found = earlier | {each.test: each for each in suite.conclude(tests, made, short=short)}
    if tests == suite.TESTS:
        found = {each.test: each for each in suite.left_out(short=short)} | found
    return [found[test] for test in [*suite.TESTS, *ON_CUDA, *suite.GATE] if test in found]


def make_all(every: Sequence[suite.Job], folder: Path, *, short: bool) -> None:
    """Do the pieces that are not there yet, and say how long the others will take, from how long these took."""
    todo = [job for job in every if not suite.is_there(job, folder, short=short)]
    if len(todo) < len(every):
        _say(f"{len(every) - len(todo)} of {len(every)} pieces are in {folder} already: delete it to begin again")
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


def write(outcomes: Sequence[Outcome], to: Path, machine: str, *, short: bool, is_gate: bool) -> None:
    """Table and pictures."""
    from attnbench.reports.style import save
    from studies.acceptance import chart, table

    text = table.markdown(outcomes, machine, short=short, is_gate=is_gate)
    (to / "acceptance.md").write_text(text, encoding="utf-8")
    for name, drawn in chart.pictures(outcomes).items():
        save([drawn], to, name)


def folder_of(what: Part, accelerator: str) -> Path:
    """Where a part's table goes: each accelerator has a folder of its own, next to that of machines without one."""
    name = "-".join(re.findall(r"[a-z0-9]+", accelerator.partition(",")[0].lower()))
    folder = FOLDERS[what]
    return folder.with_name(f"{folder.name}-on-{name}") if name else folder


def accelerator() -> str:
    """As the environment names it; empty where there is none."""
    from attnbench.devices import device

    return device("cuda").facts().accelerator


def machine() -> str:
    """Processor, cores and versions, in a few words."""
    from attnbench.devices import environment

    found = environment.collect()
    versions = f"Python {platform.python_version()}, torch {found.versions.get('torch', '?')}"
    accelerator = f", {found.accelerator}" if found.accelerator else ""
    return f"{found.cpu}, {found.num_physical_cores} cores, {versions}{accelerator}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - progress


if __name__ == "__main__":
    typer.run(accept)
