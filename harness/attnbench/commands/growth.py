"""`attnbench growth`: how memory grows with length, and where a limit is reached."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands.ending import conclude, leave
from attnbench.commands.options import AsJson, CallLimit, MemoryLimit, ResultsFolder, Seed, Settings, Timeout

if TYPE_CHECKING:
    from attnbench.analysis.attempts import Followed
    from attnbench.analysis.growth import Growth
    from attnbench.analysis.results import Results

CALL_LIMIT_S = 20.0


def growth(  # noqa: PLR0913 - one parameter for each option
    implementations: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|FILE.py:NAME]...", help="Which to look at. Default: all.")
    ] = None,
    *,
    sweep: Annotated[str, typer.Option(metavar="NAME|FILE", help="A sweep by name, or a TOML file.")] = "growth",
    settings: Settings = None,
    memory_limit: MemoryLimit = 0.0,
    is_tried: Annotated[bool, typer.Option("--try/--no-try", help="Try a call on either side of the limit.")] = True,
    call_limit: CallLimit = CALL_LIMIT_S,
    timeline: Annotated[
        int, typer.Option(min=0, metavar="LENGTH", help="Also draw what one call at this length holds, by event.")
    ] = 0,
    snapshot: Annotated[bool, typer.Option("--snapshot", help="Also keep CUDA's memory snapshots.")] = False,
    timeout: Timeout = 60.0,
    results: ResultsFolder = Path("results"),
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the page goes. Default: the run.")] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Fit how memory grows with length, predict where a limit is reached, and try calls on either side of it."""
    from attnbench import plugins
    from attnbench.analysis import attempts
    from attnbench.analysis.growth import growths
    from attnbench.analysis.results import read
    from attnbench.commands import progress
    from attnbench.processes import session as run
    from attnbench.processes.planning import Selection, plan
    from attnbench.processes.worker_client import Crew
    from attnbench.reports import growth as told

    limit_bytes = int(memory_limit * 2**30)
    selection = Selection(
        sweep=sweep,
        settings=settings or (),
        implementations=implementations or (),
        call_limit_s=call_limit,
        timeout_s=timeout,
        memory_limit_bytes=limit_bytes,
        seed=seed,
    )
    planned = plan(selection, with_baseline=False)
    folder = run.new_folder(results, planned.sweep)
    with progress.watching() as watch:
        run.execute(planned, folder, watch, stages=("check", "metrics"))
    found = read(folder)
    measured = growths(found, limit_bytes)
    notes: list[str] = []
    with Crew(folder / "worker.log", timeout, attempts.SETTINGS) as crew:
        asking = attempts.Asking(
            crew=crew,
            specs={plugins.name_of(spec): spec for spec in planned.implementations},
            call_limit_s=CALL_LIMIT_S if call_limit is None else call_limit,
            tell=lambda line: typer.echo(line, err=True),
        )
        grown = asking.limited(measured, limit_bytes, tries=is_tried)
        followed = list(asking.followed(grown, timeline)) if timeline else []
        if snapshot:
            notes += [f"memory snapshot: {path.name}" for path in asking.snapshots(grown, to or folder)]
    _write(grown, found, followed, notes, to or folder)
    if as_json:
        typer.echo(json.dumps([told.facts(each) for each in grown], indent=2))
    else:
        for title, members in told.by_panel(grown).items():
            typer.echo(f"\n{title}")
            for each in members:
                typer.echo(f"  {told.sentence(each)}")
        typer.echo(f"\nPage and pictures: {to or folder}")
    if any(each.is_wrong for each in grown):
        leave(has_findings=True)
    conclude(found, failures=False)


def _write(grown: "list[Growth]", found: "Results", followed: "list[Followed]", notes: list[str], to: Path) -> None:
    """Page, JSON and pictures."""
    from attnbench.reports import growth
    from attnbench.reports.style import save

    try:
        to.mkdir(parents=True, exist_ok=True)
        drawn = [*save(growth.curves(grown), to, "growth"), *save(growth.timelines(followed), to, "timeline")]
        names = [path.stem for path in drawn if path.suffix == ".png"]
        (to / "growth.md").write_text(growth.markdown(grown, found, names, notes), encoding="utf-8")
        text = json.dumps([growth.facts(each) for each in grown], indent=2)
        (to / "growth.json").write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write to {to}: {error.strerror}; choose another folder with --to") from None
