"""`attnbench run`: sweep, check, measure, store and report."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder, Resume, TimingOptions

if TYPE_CHECKING:
    from attnbench.devices.described import DataSheet

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
        bool,
        typer.Option(
            "--dry-run",
            help="Only print the cells, their predicted time, and those that are left out. With --set device=h200 "
            "(a100, h100, or a data sheet as TOML or JSON): plan for a GPU that is not here.",
        ),
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
    from attnbench import plugins
    from attnbench.commands import running, terminal
    from attnbench.commands.parts import shard
    from attnbench.processes.execution import new_folder
    from attnbench.reports import endings
    from attnbench.storage.journal import HOSTS

    if dry_run and resume is not None:
        raise ValueError("--dry-run and --resume: give one of them")
    sheet, options = _described(options, dry_run=dry_run)
    if dry_run:
        from attnbench.commands.dry_run import print_plan

        print_plan(options.plan(baseline=baseline), as_json=as_json, sheet=sheet)
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
        planned = options.plan(baseline=baseline)
        if "/" in cluster and "://" not in cluster:
            planned, cluster = shard(planned, cluster), ""
        folder = new_folder(results, planned.sweep)
    names = f"{len(planned.implementations)} implementation{'s' * (len(planned.implementations) != 1)}"
    running.note(f"{len(planned.workloads)} workloads x {names}, into {folder}")
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


def _described(options: TimingOptions, *, dry_run: bool) -> "tuple[DataSheet | None, TimingOptions]":
    """The data sheet of --set device=, if it names one, and the options with the device that it describes.

    Raises:
        ValueError: there is no such sheet, or the command would measure on it.
    """
    from attnbench.devices import described

    for setting in options.settings or ():
        axis, _, value = setting.partition("=")
        if axis.strip() == "device" and (value in described.names() or value.endswith((".toml", ".json"))):
            if not dry_run:
                raise ValueError(f"device={value} is a data sheet, not a device of this machine: give --dry-run, too")
            sheet = described.load(value)
            settings = [f"device={sheet.kind}" if each == setting else each for each in options.settings or ()]
            return sheet, replace(options, settings=settings)
    return None, options


COMMAND = Command(
    function=run,
    order=20,
    examples=(
        "attnbench run",
        "attnbench run sdpa fused --set seq_len=128,1024 --set mask=causal",
        "attnbench run mine.py --sweep quick --budget 120",
        "attnbench run --resume RUN",
        "attnbench run --sweep gpu --set device=h200 --dry-run",
        "attnbench run --sweep full --cluster auto",
        "attnbench run --sweep full --shard 2/8",
    ),
)
