"""`attnbench run`: sweep, check, measure, store and report."""

from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.commands import Command
from attnbench.commands.frame import present
from attnbench.commands.options import TimingOptions

if TYPE_CHECKING:
    from attnbench.storage.events import Plan

OPTIONS = TimingOptions(sweep="quick")


def run(
    *,
    options: TimingOptions = OPTIONS,
    baseline: str = "sdpa",
    results: Path = Path("results"),
    resume: str | None = None,
    dry_run: bool = False,
    cluster: str = "",
) -> None:
    """Sweep, check, measure, store and report.

    Options:
        baseline (NAME): The implementation that others are compared with; it always takes part.
        dry_run: Only print the shapes and implementations that it would measure.
        cluster (--cluster --shard ADDRESS|K/N): Measure on the hosts of a Ray cluster: auto, HOST:PORT or
            ray://HOST:PORT (needs the extra cluster). K/N: only every N-th shape from the K-th on, in one of N jobs;
            attnbench report RUN RUN ... joins them.

    Examples:
        attnbench run
        attnbench run sdpa fused --set seq_len=128,1024 --set mask=causal
        attnbench run mine.py --sweep quick --budget 120
        attnbench run --resume RUN
        attnbench run --sweep full --dry-run
        attnbench run --sweep full --cluster auto
        attnbench run --sweep full --shard 2/8
    """
    from attnbench.commands import running, terminal
    from attnbench.commands.parts import shard
    from attnbench.processes.execution import new_folder
    from attnbench.reports import endings
    from attnbench.storage.journal import HOSTS

    if dry_run:
        if resume is not None:
            raise ValueError("--dry-run and --resume: give one of them")
        print_plan(options.plan(baseline=baseline))
        return
    if resume is not None:
        folder, planned = running.to_resume(options, resume, results, "run", {"--cluster"})
    else:
        planned = options.plan(baseline=baseline)
        if "/" in cluster and "://" not in cluster:
            planned, cluster = shard(planned, cluster), ""
        folder = new_folder(results, planned.sweep)
    running.note(f"{len(planned.workloads)} shapes x {len(planned.implementations)} implementations, into {folder}")
    if not cluster and (folder / HOSTS).exists():
        raise ValueError(f"{folder} is a run on a cluster: say again which, with --cluster")
    hint = f"{running.how_to_resume(planned, folder)}{f' --cluster {cluster}' * bool(cluster)}"
    with running.interruptible(hint):
        measured = running.execute(planned, folder, hint=hint, named=options.named, cluster=cluster)
        running.write_reports(measured, folder)
    end = endings.of_run(measured)
    running.print_report(measured, end, lambda: terminal.print_results(measured))
    running.finish(end, is_silent=True)


def print_plan(plan: "Plan") -> None:
    """Print the groups of shapes with their lengths and implementations, or every cell as JSON; nothing is run."""
    from attnbench.commands.terminal import print_table, say
    from attnbench.devices import device
    from attnbench.reports import cells, grouped
    from attnbench.units import duration

    missing = {name: why for name in {each.device for each in plan.workloads} if (why := device(name).missing())}
    every = [(workload, str(arm)) for workload in plan.workloads for arm in plan.cells(workload)]
    entries = [{"workload": workload.id, "implementation": name} for workload, name in every]

    def show() -> None:
        rows = []
        for title, members in grouped(every, lambda cell: cells.title(cell[0].axes())).items():
            lengths = dict.fromkeys(cells.length(workload.axes()) for workload, _ in members)
            rows.append((title, ", ".join(lengths), ", ".join(dict.fromkeys(name for _, name in members))))
        print_table(("shapes", "lengths", "implementations"), rows)
        for name, why in missing.items():
            say(f"{name}: {why}")
        say(f"{len(every):,} cells on {len(plan.workloads):,} shapes, in about {duration(plan.budget_s)}.")

    present(lambda: {"cells": entries, "budget_s": plan.budget_s, "missing": missing}, show)


COMMAND = Command(run, order=20)
