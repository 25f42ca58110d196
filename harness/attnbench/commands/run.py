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
    is_interpreted: Annotated[bool, typer.Option("--interpret", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Sweep, check, measure, store and report."""
    from attnbench import plugins
    from attnbench.cluster.merge import HOSTS
    from attnbench.commands import running, terminal
    from attnbench.processes.execution import new_folder, refuse_interpreted
    from attnbench.processes.planning import plan

    if cluster and (dry_run or is_interpreted):
        raise ValueError(f"--cluster and {'--dry-run' if dry_run else '--interpret'}: give one of them")
    if dry_run:
        if resume is not None:
            raise ValueError("--dry-run and --resume: give one of them")
        from attnbench.commands.dry_run import print_plan
        from attnbench.devices import described

        sheet = None if device_facts is None else described.load(device_facts)
        print_plan(plan(options.selection(baseline=baseline)), results, as_json=as_json, sheet=sheet)
        return
    if device_facts is not None:
        raise ValueError("--device-facts describes a device that is not here: give --dry-run, too")
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
        measured = running.execute_on_cluster(planned, folder, cluster, kept=f"{kept} --cluster {cluster}")
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
            typer.echo(f"Reports and plots: {folder}")
    running.conclude(measured, has_findings=failed)


COMMAND = Command(
    function=run,
    order=20,
    examples=(
        "attnbench run",
        "attnbench run sdpa fused --set seq_len=128,1024 --set mask=causal",
        "attnbench run mine.py --sweep quick --budget 120",
        "attnbench run --resume RUN",
        "attnbench run --sweep gpu --dry-run --device-facts h200",
        "attnbench run --sweep full --cluster auto",
    ),
)
