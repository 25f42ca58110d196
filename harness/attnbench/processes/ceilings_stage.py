"""The ceilings stage of a run: once for each device, dtype and number of threads that is going to be timed."""

from typing import TYPE_CHECKING

from attnbench.processes.messages import Failed, FindCeilings, Found
from attnbench.processes.worker_client import WorkerLostError
from attnbench.storage.events import CeilingsMeasured
from attnbench.storage.records import Ceilings
from attnbench.workloads.workload import Workload

if TYPE_CHECKING:
    from attnbench.processes.session import Run

BUDGET_SHARE = 0.05
MOST_S = 1.0
"""What one key may cost beyond its fewest rounds, or its part of the share of the budget where that is less."""


def find_ceilings(run: "Run") -> None:
    """Take what the journal does not yet hold. What cannot be taken is noted with its reason, and times stand alone."""
    live = [workload for workload in run.plan.workloads if run.state.live(workload.id, run.specs)]
    wanted = {workload.place: workload for workload in reversed(live)}
    for number, (key, workload) in enumerate(wanted.items()):
        if key not in run.state.ceilings:
            run.tell("ceilings", ", ".join(map(str, key[:2])), number, len(wanted))
            run.note(_find(run, workload, min(MOST_S, BUDGET_SHARE * run.plan.budget_s / len(wanted))))


def _find(run: "Run", workload: Workload, limit_s: float) -> CeilingsMeasured:
    if not run.crew.is_at_work:
        run.fresh_worker()
    start_s = run.clock()
    try:
        reply = run.crew.ask(FindCeilings(workload=workload, limit_s=limit_s))
        if isinstance(reply, Found):
            return CeilingsMeasured(ceilings=reply.ceilings, spent_s=run.clock() - start_s)
        assert isinstance(reply, Failed)
        message = reply.message
    except WorkerLostError as lost:
        message = str(lost)
    device, dtype, num_threads = workload.place
    none = Ceilings(device=device, dtype=dtype, num_threads=num_threads, message=message)
    return CeilingsMeasured(ceilings=none, spent_s=run.clock() - start_s)
