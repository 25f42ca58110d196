"""What commands share that measure two states of the code: from what was typed to the results of the session."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from attnbench.commands.ending import INTERRUPTED

if TYPE_CHECKING:
    from attnbench.analysis.results import Results
    from attnbench.processes.sides import Asked
    from attnbench.storage.events import Plan


def planned_anew(asked: "Asked", results: Path) -> tuple[Path, "Plan"]:
    """Folder and plan of a new comparison; leaves with 0 where all is the same.

    Raises:
        ValueError: whatever was given that cannot be.
    """
    from attnbench.processes import session as run
    from attnbench.processes import sides

    if not asked.base or not asked.candidate:
        raise ValueError(f"give two sides, BASE and CANDIDATE: each is {sides.FORMS}")
    sides.sweep_up(results)
    folder = run.new_folder(results, "compare")
    planned, same = sides.plan(asked, folder)
    if same:
        typer.echo(f"the same on both sides, not compared: {', '.join(same)} (name them with -i to do so)", err=True)
    if planned is None:
        sides.clear(folder)
        typer.echo("nothing to compare: every implementation is the same on both sides")
        raise typer.Exit(0)
    return folder, planned


def side_by_side(planned: "Plan", folder: Path) -> "Results":
    """Run it, with both sides in place meanwhile.

    Raises:
        ValueError: it cannot be run.
    """
    from attnbench.analysis.results import read
    from attnbench.commands import progress
    from attnbench.processes import session as run
    from attnbench.processes import sides

    assert planned.sides is not None
    how = "each side in processes of its own" if planned.sides.is_apart else "both sides in one process"
    plural = "" if len(planned.workloads) == 1 else "s"
    typer.echo(f"{len(planned.workloads)} workload{plural}, {how}, into {folder}", err=True)
    try:
        with sides.at_work(planned, folder), progress.watching() as watch:
            run.execute(planned, folder, watch)
            return read(folder)
    except KeyboardInterrupt:
        more = planned.sides.build_option
        typer.echo(f"stopped; go on with: attnbench compare --resume {folder}{more}", err=True)
        raise typer.Exit(INTERRUPTED) from None
