"""`attnbench report`: rebuild the reports of a stored run, join several runs, or export the cells for another tool."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import typer

from attnbench.analysis.results import Results, read
from attnbench.cluster.shares import merged
from attnbench.commands import Command, ExitCode, running
from attnbench.commands.frame import present
from attnbench.plugins import name_of, plugs, require_known
from attnbench.reports import stock, summary
from attnbench.storage import older
from attnbench.storage.events import SCHEMA, Plan, RunFinished, RunStarted
from attnbench.storage.files import write_atomically, writing_to
from attnbench.storage.journal import JOURNAL, Salvaged, events, find_run, journal_of, salvage, write
from attnbench.storage.records import FALSE_SHARE

MOST_LINES = 10
MAY_DIFFER = {
    **dict.fromkeys(("sweep", "model"), ""),
    **dict.fromkeys(("workloads", "implementations", "unasked", "ladders", "alone"), ()),
    **dict.fromkeys(("budget_s", "seed"), 0),
    "digests": {},
    "left_out": {},
    "why_left_out": {},
    "false_share": FALSE_SHARE,
}
"""Fields in which the plans of joined runs may differ. `_common` replaces them by these values before it compares."""


def report(
    runs: list[str] | None = None,
    *,
    results: Path = Path("results"),
    to: Path | None = None,
    kind: str | None = None,
    is_salvaged: bool = False,
    open_page: bool = False,
) -> ExitCode:
    """Rebuild the reports of a stored run. Several runs, such as those of `run --shard`, are joined. Needs no torch.

    The journal of a run of version 0.1.0 is converted first.

    Options:
        runs ([RUN]...): Names or folders; several are joined into one report. Default: the newest run. If these are
            files that check --report wrote, their differences are printed instead.
        to (PATH): Write the reports and a copy of the journal to this folder; with --format, write to this file.
        kind (--format NAME): Only this report: csv, markdown, html, pytest-benchmark, picture, latency_plot,
            memory_plot or ratio_plot. Without --to, text is printed, and a picture is written to the run's folder.
        is_salvaged (--salvage): Copy the intact parts of a damaged RUN to a new run, RUN-salvaged.
    """
    names = runs or []
    if is_salvaged + (kind is not None) + open_page > 1:
        raise ValueError("--salvage, --format and --open exclude one another: give one of them")
    if names and all(Path(name).suffix == stock.SUFFIX and Path(name).is_file() for name in names):
        typer.echo(stock.side_by_side([Path(name) for name in names]), nl=False)
        return ExitCode.passed
    if is_salvaged:
        if len(names) != 1:
            raise ValueError("--salvage takes one damaged run: name it, as in attnbench report RUN --salvage")
        saved = salvage(Path(names[0]) if Path(names[0]).is_file() else find_run(names[0], results), to)
        facts = saved._asdict() | {"folder": str(saved.folder) if saved.is_damaged else None, "plan": None}
        present(lambda: facts, lambda: _print_salvaged(names[0], saved))
        return ExitCode.passed
    folders = [find_run(name, results) for name in names] or [find_run(None, results)]
    for folder in folders:
        if older.convert(journal := journal_of(folder)):
            running.print_note(f"{journal} was of an older version and is converted; {journal.name}.old keeps it")
            running.print_note("numbers that somebody edited before are not noticed any more")
    stored = read(folders[0] if len(folders) == 1 else _join(folders))
    if kind is not None:
        _write_one(stored, kind, to)
        return ExitCode.passed
    target = to or stored.folder
    if target.resolve() != stored.folder.resolve():
        journal = journal_of(stored.folder)
        with writing_to(target):
            write_atomically(target / journal.name, journal.read_bytes())
    failed = running.write_reports(stored, target)
    page = target / summary.PAGE
    present(
        lambda: {"folders": [str(target)], "failed": failed},
        lambda: typer.echo(f"Report, complete in one file: {page}"),
    )
    if open_page:
        typer.launch(str(page.resolve()))
    return ExitCode.internal if failed else ExitCode.passed


def _join(runs: Sequence[Path]) -> Path:
    """Merge finished runs over different shapes, such as parts of `run --shard`; return the folder of the new run.

    The folder is next to that of the first run.

    Raises:
        ValueError: a run has not finished, or the runs share a shape or differ in more than their shapes.
    """
    measured = [(run.name, list(events(journal_of(run)))) for run in runs]
    starts = [event for _, history in measured for event in history if isinstance(event, RunStarted)]
    plans = [started.plan for started in starts]
    for run, (_, history), plan in zip(runs, measured, plans, strict=True):
        has_finished = isinstance(history[-1], RunFinished)
        if not has_finished:
            raise ValueError(f"{run} has not finished: continue it first (attnbench run --resume {run.name})")
        if _common(plan) != _common(plans[0]):
            raise ValueError(f"{run} and {runs[0]} are not parts of one run: they differ in more than their shapes")
    workloads = tuple(workload for plan in plans for workload in plan.workloads)
    places = Counter(workload.id for workload in workloads)
    if twice := [name for name, number in places.items() if number > 1]:
        raise ValueError(f"several runs have {twice[0]}: attnbench gate compares two runs of the same shapes")
    left_out = defaultdict[str, dict[str, None]](dict)
    for plan in plans:
        for name, ids in plan.left_out.items():
            left_out[name] |= dict.fromkeys(ids)
    whole = msgspec.structs.replace(
        plans[0],
        workloads=workloads,
        budget_s=sum(plan.budget_s for plan in plans),
        false_share=min(FALSE_SHARE, sum(plan.false_share for plan in plans)),
        left_out={name: tuple(ids) for name, ids in left_out.items()},
    )
    folder = runs[0].with_name(f"{runs[0].name}-joined")
    started = msgspec.structs.replace(starts[0], schema=SCHEMA, run=folder.name, plan=whole)
    with writing_to(folder):
        write(folder / JOURNAL, merged(started, measured, (), is_over=True))
    return folder


def _common(plan: Plan) -> tuple[Plan, dict[str, str | None]]:
    """Return what joined runs must share: the plan with its MAY_DIFFER fields reset, and source digests.

    The digests are those of the implementations' files, by implementation.
    """
    digests = {name_of(spec): plan.digests.get(spec) for spec in plan.specs.values()}
    return msgspec.structs.replace(plan, **MAY_DIFFER), digests


def _write_one(stored: Results, kind: str, to: Path | None) -> None:
    """Write one report to the file `to`; if `to` is None, print a text, or write a picture into the run's folder."""
    known = plugs("attnbench.reports", "REPORT")
    require_known("format", [kind], known)
    chosen, folder = known[kind], stored.folder
    if to is None and chosen.text is not None:
        text = chosen.text(stored)
        present(lambda: {"format": kind, "text": text}, lambda: typer.echo(text, nl=False))
        return
    if to is not None:
        chosen, folder = replace(chosen, file=to.name), to.parent
    with writing_to(folder):
        files = [str(path) for path in chosen.write(stored, folder)]
    present(lambda: {"format": kind, "files": files}, lambda: typer.echo("\n".join(files or ["nothing to draw"])))


def _print_salvaged(run: str, saved: Salvaged) -> None:
    if not saved.is_damaged:
        typer.echo(f"{run} is intact ({saved.num_kept} lines): nothing was written")
        return
    typer.echo(f"{saved.folder} holds the {saved.num_kept} intact lines; {len(saved.dropped)} were left out:")
    for number, wrong in list(saved.dropped.items())[:MOST_LINES]:
        typer.echo(f"  line {number}: {wrong}")
    typer.echo("A lost line may have been a failure, so no gate accepts this run. Continue it with")
    typer.echo(f"  {saved.plan.resume_command(str(saved.folder))}")


COMMAND = Command(report, order=110)
