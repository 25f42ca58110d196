"""`attnbench report --salvage`: keep the intact parts of a damaged run."""

import json
from pathlib import Path
from typing import NoReturn

import typer

from attnbench.commands import ExitCode

MOST_SHOWN = 10


def salvage(run: str, results: Path, to: Path | None, *, as_json: bool) -> NoReturn:
    """Write every intact part of a damaged run into a new one, and print what is left out. The damaged one stays."""
    from attnbench.storage import salvage as storage
    from attnbench.storage.journal import find_run

    given = Path(run)
    saved = storage.salvage(given if given.is_file() else find_run(run, results), to)
    if as_json:
        shown = {
            "folder": str(saved.folder) if saved.is_damaged else None,
            "num_kept": saved.num_kept,
            "dropped": {str(number): wrong for number, wrong in saved.dropped.items()},
            "gaps": list(saved.gaps),
        }
        typer.echo(json.dumps(shown, indent=2))
        raise typer.Exit(ExitCode.passed)
    if not saved.is_damaged:
        typer.echo(f"{run} is intact: all of its {saved.num_kept} lines are; nothing was written")
        raise typer.Exit(ExitCode.passed)
    typer.echo(f"{saved.folder} has the {saved.num_kept} lines that are intact; {len(saved.dropped)} were left out:")
    for number, wrong in list(saved.dropped.items())[:MOST_SHOWN]:
        typer.echo(f"  line {number}: {wrong}")
    if (left := len(saved.dropped) - MOST_SHOWN) > 0:
        typer.echo(f"  and {left} more")
    if saved.gaps:
        places = ", ".join(map(str, saved.gaps[:MOST_SHOWN])) + ", ..." * (len(saved.gaps) > MOST_SHOWN)
        typer.echo(f"changed or gone is what came before line {places}")
    typer.echo("A failure may have been among what is lost, so no gate takes this run. Go on with it by")
    typer.echo(f"  {saved.plan.resume_command(str(saved.folder))}")
    raise typer.Exit(ExitCode.passed)
