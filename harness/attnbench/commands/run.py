"""`attnbench run`: sweep, check, measure, store and report."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder, Resume, TimingOptions

if TYPE_CHECKING:
    from attnbench.storage.events import Plan

OPTIONS = TimingOptions(sweep="quick")


def run(
    *,
    options: TimingOptions = OPTIONS,
    baseline: Annotated[
        str,
        typer.Option(metavar="NAME", help="The implementation that others are compared with; it always takes part."),
    ] = "sdpa",
    results: ResultsFolder = Path("results"),
    resume: Resume = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the shapes and implementations that it would measure.")
    ] = False,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            "--shard",
            metavar="ADDRESS|K/N",
            help="Measure on the hosts of a Ray cluster: auto, HOST:PORT or ray://HOST:PORT (needs "
            "attnbench\\[cluster]). K/N: only every N-th shape from the K-th on, in one of N jobs; attnbench report "
            "RUN RUN ... joins them.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Sweep, check, measure, store and report."""
    from attnbench.commands import running, terminal
    from attnbench.commands.parts import shard
    from attnbench.processes.execution import new_folder
    from attnbench.reports import endings
    from attnbench.storage.journal import HOSTS

    if dry_run and resume is not None:
        raise ValueError("--dry-run and --resume: give one of them")
    if dry_run:
        print_plan(options.plan(baseline=baseline), as_json=as_json)
        return
    if resume is not None:
        folder, planned = running.to_resume(options, resume, results, "run", {"--cluster"})
    else:
        planned = options.plan(baseline=baseline)
        if "/" in cluster and "://" not in cluster:
            planned, cluster = shard(planned, cluster), ""
        folder = new_folder(results, planned.sweep)
    names = f"{len(planned.implementations)} implementation{'s' * (len(planned.implementations) != 1)}"
    running.note(f"{len(planned.workloads)} workload{'s' * (len(planned.workloads) != 1)} x {names}, into {folder}")
    if not cluster and (folder / HOSTS).exists():
        raise ValueError(f"{folder} is a run on a cluster: say again which, with --cluster")
    kept = f"{running.kept(planned, folder)}{f' --cluster {cluster}' * bool(cluster)}"
    measured = running.execute(planned, folder, kept=kept, named=options.named, cluster=cluster)
    with running.finished(folder):
        failed = running.write_reports(measured, folder)
        if as_json:
            running.print_report(measured, endings.of_run(measured), has_failed=failed)
        else:
            terminal.print_results(measured)
    running.finish(endings.of_run(measured), has_failed=failed, is_silent=True)


def print_plan(plan: "Plan", *, as_json: bool) -> None:
    """Print the groups of shapes with their lengths and implementations, or every cell as JSON; nothing is run."""
    from attnbench.commands import terminal
    from attnbench.devices import device
    from attnbench.reports import grouped, titles
    from attnbench.units import duration

    missing = {name: why for name in {each.device for each in plan.workloads} if (why := device(name).missing())}
    every = [(workload, str(arm)) for workload in plan.workloads for arm in plan.cells(workload)]
    if as_json:
        entries = [{"workload": workload.id, "implementation": name} for workload, name in every]
        typer.echo(json.dumps({"cells": entries, "budget_s": plan.budget_s, "missing": missing}, indent=2))
        return
    rows = []
    for title, members in grouped(every, lambda cell: titles.title(cell[0].axes())).items():
        lengths = dict.fromkeys(titles.length(workload.axes()) for workload, _ in members)
        rows.append((title, ", ".join(lengths), ", ".join(dict.fromkeys(name for _, name in members))))
    terminal.print_table(("shapes", "lengths", "implementations"), rows)
    for name, why in missing.items():
        terminal.say(f"{name}: {why}")
    terminal.say(f"{len(every):,} cells on {len(plan.workloads):,} shapes, in about {duration(plan.budget_s)}.")


COMMAND = Command(
    function=run,
    order=20,
    examples=(
        "attnbench run",
        "attnbench run sdpa fused --set seq_len=128,1024 --set mask=causal",
        "attnbench run mine.py --sweep quick --budget 120",
        "attnbench run --resume RUN",
        "attnbench run --sweep full --dry-run",
        "attnbench run --sweep full --cluster auto",
        "attnbench run --sweep full --shard 2/8",
    ),
)
