"""`attnbench run`: sweep, check, measure, store and report."""

import json
from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder, Resume, TimingOptions

OPTIONS = TimingOptions(sweep="quick")


def run(
    *,
    options: TimingOptions = OPTIONS,
    baseline: Annotated[
        str,
        typer.Option(metavar="NAME", help="What ratios are taken against; it takes part though -i does not name it."),
    ] = "sdpa",
    results: ResultsFolder = Path("results"),
    resume: Resume = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run, how long it takes, and what is left out; no more.")
    ] = False,
    device_facts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="With --dry-run: plan for a device that is not here, by its data sheet: a100, h100, h200, or a TOML "
            "or JSON file with the same keys.",
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Measure on the hosts of a Ray cluster: auto, HOST:PORT, ray://HOST:PORT, or local:N for N on this "
            "machine, to try it out. Needs attnbench\\[cluster].",
        ),
    ] = "",
    hosts_per_cell: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="With --cluster: measure each cell on N hosts of each kind, or on as many as there are, and judge "
            "them together. From 3 on their spread is known.",
        ),
    ] = 1,
    is_interpreted: Annotated[bool, typer.Option("--interpret", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Sweep, check, measure, store and report."""
    from attnbench import plugins
    from attnbench.commands import running, terminal
    from attnbench.processes.execution import new_folder, refuse_interpreted
    from attnbench.processes.planning import plan
    from attnbench.reports import endings
    from attnbench.storage.journal import HOSTS

    _require_together(
        (bool(cluster) and is_interpreted, "--cluster and --interpret: give one of them"),
        (
            hosts_per_cell > 1 and not cluster,
            f"--hosts-per-cell {hosts_per_cell} needs --cluster: give it, too",
        ),
        (dry_run and resume is not None, "--dry-run and --resume: give one of them"),
        (device_facts is not None and not dry_run, "--device-facts describes what is not here: give --dry-run, too"),
    )
    if dry_run:
        from attnbench.commands.dry_run import print_plan
        from attnbench.devices import described

        sheet = None if device_facts is None else described.load(device_facts)
        planned = plan(options.selection(baseline=baseline))
        if cluster:
            hosts = f"{hosts_per_cell} host{'s' * (hosts_per_cell > 1)} of each kind in the cluster"
            running.note(f"each of {planned.num_cells} cells is measured on {hosts}; predicted here, for this machine:")
        print_plan(planned, as_json=as_json, sheet=sheet)
        return
    if resume is not None:
        folder, planned = running.to_resume(
            options.context, resume, results, {"names", "--implementation", "--cluster"}
        )
        if planned.sides is not None:
            raise ValueError(f"{resume} compares two sides: go on with {planned.resume_command(resume)}")
        if planned.command != "run":
            raise ValueError(f"{resume} is no sweep: go on with {planned.resume_command(resume)}")
        running.require_named(planned, planned.implementations, options.named)
        plugins.check_specs(planned.implementations)
    else:
        planned = structs.replace(plan(options.selection(baseline=baseline)), is_interpreted=is_interpreted)
        refuse_interpreted(planned)
        folder = new_folder(results, planned.sweep)
    number = len(planned.implementations)
    plural = "" if number == 1 else "s"
    running.note(f"{len(planned.workloads)} workloads x {number} implementation{plural}, into {folder}")
    kept = running.kept(planned, folder)
    if cluster:
        measured = running.execute_on_cluster(
            planned, folder, cluster, hosts_per_cell=hosts_per_cell, kept=f"{kept} --cluster {cluster}"
        )
    elif (folder / HOSTS).exists():
        raise ValueError(f"{folder} is a run on a cluster: say again which, with --cluster")
    else:
        measured = running.execute(planned, folder, kept=kept, named=options.named)
    with running.finished(folder):
        failed = running.write_reports(measured, folder)
        if as_json:
            typer.echo(json.dumps(terminal.summary(measured), indent=2))
        else:
            terminal.print_results(measured)
    running.finish(endings.of_run(measured), has_failed=failed, is_silent=True)


def _require_together(*rules: tuple[bool, str]) -> None:
    """Check which options are given together.

    Raises:
        ValueError: one is given without what it needs, or with what it excludes.
    """
    for is_wrong, said in rules:
        if is_wrong:
            raise ValueError(said)


COMMAND = Command(
    function=run,
    order=20,
    examples=(
        "attnbench run",
        "attnbench run sdpa fused --set seq_len=128,1024 --set mask=causal",
        "attnbench run mine.py --sweep quick --budget 120",
        "attnbench run --resume RUN",
        "attnbench run --sweep gpu --dry-run --device-facts h200",
        "attnbench run --sweep full --cluster auto --hosts-per-cell 3",
    ),
)
