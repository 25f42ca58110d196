"""Run every trial and write the tables: `python -m studies.torture`."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import pandas as pd
import typer

from attnbench.storage.journal import find_runs
from attnbench.units import markdown_table
from studies import frame
from studies.torture import commands, damages, kills, surroundings
from studies.torture.trial import TINY, Trial, TrialFolder

HEADER = """# What a run survives

Made by `nox -s torture`. Each trial is a real one: processes are killed, journals damaged, disks filled. *Died*: a
traceback, a hang, another exit code than was due, or processes that are left. *Lost*: finished work that is gone, or a
number that changed. *Unclear*: a message without the input, the allowed values, or a way out.

"""


def torture(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the tables go.")] = Path("results/torture"),
    only: Annotated[str, typer.Option(metavar="WORDS", help="Subjects that begin so, such as kills.")] = "",
    *,
    short: Annotated[bool, typer.Option("--short", help="A tenth of it, in two minutes.")] = False,
) -> None:
    """Run every trial; exit code 1 if a run died, lost work or gave an unclear message."""
    trials = []
    for trial in tried(only, short=short):
        trials.append(trial)
        _write(trials, to)  # rewritten after each trial, so that an interrupted study keeps its results
        if not trial.is_good or not len(trials) % 20:
            frame.progress(f"{len(trials)} {trial.subject}, {trial.what}: {bad(trial) or 'so far so good'}")
    typer.echo(markdown(trials))
    sys.exit(any(not trial.is_good for trial in trials))


def _write(trials: list[Trial], to: Path) -> None:
    table = pd.DataFrame([msgspec.structs.asdict(trial) for trial in trials])
    frame.save(to / "torture.csv", table.to_csv(index=False))
    frame.save(to / "torture.md", markdown(trials))


def tried(only: str = "", *, short: bool = False) -> Iterator[Trial]:
    """Run and yield the trials of all subjects whose name begins with `only`; if `short` is true, fewer of them."""
    with tempfile.TemporaryDirectory(prefix="attnbench-torture-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        first = TrialFolder(folder / "first")
        first.run("run", *TINY)
        (whole,) = find_runs(first.folder / "results")
        subjects: dict[str, Callable[[], Iterator[Trial]]] = {
            "kills": lambda: kills.kills(folder, 6 if short else 60),
            "signals": lambda: kills.signals(folder, 6 if short else 30),
            "journals": lambda: damages.damaged(whole, folder / "damaged", 60 if short else 300),
            "commands": lambda: commands.fuzzed(folder / "commands", 60 if short else 300),
            "surroundings": lambda: surroundings.all_of(folder, whole, short=short),
        }
        for subject, trials in subjects.items():
            if subject.startswith(only):
                yield from trials()


def bad(trial: Trial) -> str:
    """Describe the failures of a trial; return "" if there is none."""
    return "; ".join(f"{name}: {words}" for name in ("died", "lost", "unclear") if (words := getattr(trial, name)))


def markdown(trials: list[Trial]) -> str:
    """Format the page: counts by subject, failures, and trials that could not be tried here."""
    rows = []
    for subject in dict.fromkeys(trial.subject for trial in trials):
        own = [trial for trial in trials if trial.subject == subject and not trial.skipped]
        counts = {"tried": len(own), "survived": sum(not trial.died for trial in own)}
        counts |= {name: sum(bool(getattr(trial, name)) for trial in own) for name in ("lost", "unclear")}
        rows.append({"subject": subject} | {name: str(count) for name, count in counts.items()})
    troubles = [{"subject": each.subject, "what": each.what, "how": bad(each)} for each in trials if not each.is_good]
    skipped = [{"subject": each.subject, "what": each.what, "why not": each.skipped} for each in trials if each.skipped]
    parts = [markdown_table(rows)]
    parts += ["## What went wrong", markdown_table(troubles)] * bool(troubles)
    parts += ["## Not tried", markdown_table(skipped)] * bool(skipped)
    return HEADER + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    typer.run(torture)
