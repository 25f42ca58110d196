"""`attnbench run`: sweep, check, measure, store and report."""

from pathlib import Path

from msgspec import structs

from attnbench import plugins
from attnbench.cluster.shares import part
from attnbench.commands import Command, running, terminal
from attnbench.commands.frame import finish
from attnbench.commands.options import TimingOptions
from attnbench.processes.execution import new_folder
from attnbench.reports import exit_status
from attnbench.storage.events import Plan
from attnbench.storage.journal import HOSTS
from attnbench.units import duration
from attnbench.workloads.sweep import load

OPTIONS = TimingOptions(sweep="quick")


def run(
    *,
    options: TimingOptions = OPTIONS,
    baseline: str = "",
    metrics: str = "",
    results: Path = Path("results"),
    resume: str | None = None,
    cluster: str = "",
) -> None:
    """Check implementations, time the right ones against a baseline, and write a report.

    Options:
        baseline (NAME): The implementation that others are compared with; it always takes part. Default: the
            sweep's, mostly sdpa.
        metrics (NAME,NAME): Read these metrics, too (attnbench list metrics). first_call: the time of first calls, and
            after how many calls a compiled implementation has paid off; takes up to a third of the budget.
        cluster (--cluster --shard ADDRESS|K/N): Measure on the hosts of a Ray cluster: auto, HOST:PORT or
            ray://HOST:PORT (needs the extra cluster). K/N: only every N-th shape from the K-th on, in one of N jobs;
            attnbench report RUN RUN ... joins them.

    Examples:
        attnbench run
        attnbench run sdpa fused --set seq_len=128,1024 --set mask=causal
        attnbench run mine.py --sweep quick --budget 120
        attnbench run fused fused+compile sdpa --set seq_len=128 --metrics first_call
        attnbench run --resume RUN
        attnbench run --sweep full --shard 2/8
    """
    if resume is not None:
        folder, planned = running.to_resume(options, resume, results, "run", {"--cluster"})
    else:
        planned = options.plan(baseline=baseline)
        more = [*filter(None, map(str.strip, metrics.split(",")))]
        plugins.require_known("metric", more, plugins.plugs("attnbench.metrics", "METRIC"))
        metrics_read = tuple(dict.fromkeys([*planned.metrics, *more]))
        why = {} if options.named else why_left_out(planned, options.sweep)
        planned = structs.replace(planned, metrics=metrics_read, why_left_out=why)
        if "/" in cluster and "://" not in cluster:
            planned, cluster = shard(planned, cluster), ""
        folder = new_folder(results, planned.sweep)
    within = f"within {duration(planned.budget_s)}, " * (planned.budget_s > 0)
    counts = f"shapes: {len(planned.workloads)}, implementations: {len(planned.implementations)}"
    running.print_note(f"{counts}, {within}into {folder}")
    if not cluster and (folder / HOSTS).exists():
        raise ValueError(f"{folder} was run on a cluster: name the cluster again with --cluster")
    measured = running.measure(planned, folder, cluster=cluster)
    end = exit_status.of_run(measured)
    running.print_report(measured, end, lambda: terminal.print_results(measured))
    finish(end, is_silent=True)


def why_left_out(plan: Plan, sweep: str) -> dict[str, str]:
    """Return the reason for each implementation that the sweep of a plan leaves out, by name; "" if it gives none."""
    chosen = load(sweep)
    return {name: chosen.why_left_out.get(name, "") for name in (*chosen.leave_out, *plan.left_out)}


def shard(plan: Plan, text: str) -> Plan:
    """Return one part of a plan; `text` names it as K/N, as in 2/8 for the second of eight parts.

    Raises:
        ValueError: there is no such part.
    """
    place, _, number = text.partition("/")
    most = len(plan.workloads)
    if not (place.isdecimal() and number.isdecimal() and 1 <= int(place) <= int(number) <= most):
        allowed = f"give K/N with 1 <= K <= N <= {most}, the number of shapes, as in 1/{min(2, most)}"
        raise ValueError(f"--shard {text} is not allowed: {allowed}")
    return part(plan, int(place) - 1, int(number))


COMMAND = Command(run, order=15)
