"""The walk of `attnbench profile`: check each cell, then trace what agrees; a journal says what became of each.

A trace shares no pass with any timing, and no folder with any run: tracing slows a call down.
"""

from pathlib import Path

from attnbench.processes.messages import Failed, Trace, Traced
from attnbench.processes.revision import commit
from attnbench.processes.session import Run, Watch, crew_of, now
from attnbench.processes.worker_client import WorkerLostError
from attnbench.storage.events import SCHEMA, CellFailed, Plan, RunFinished, RunStarted
from attnbench.storage.journal import Journal
from attnbench.storage.records import Arm, Key
from attnbench.tracing import folders
from attnbench.workloads.workload import Workload

Files = dict[Key, Path]
"""The trace of each cell that has one."""


def execute(plan: Plan, folder: Path, watch: Watch) -> Files:
    """Check every cell, trace those that agree, and return the files; the journal in `folder` says the rest.

    Raises:
        ValueError: the folder cannot be written, or no worker can start.
    """
    with Journal(folder) as journal, crew_of(plan, folder) as crew:
        run = Run(plan, journal, crew, watch)
        run.note(RunStarted(schema=SCHEMA, run=folder.name, time=now(), commit=commit(), plan=plan))
        run.fresh_worker()
        run.check_all()
        files = _trace_all(run, folder)
        run.note(RunFinished(time=now(), elapsed_s=run.elapsed_s, reason="", counters=run.count()))
    return files


def _trace_all(run: Run, folder: Path) -> Files:
    cells = [(each, arm) for each in run.plan.workloads for arm in run.state.live(each.id, run.specs)]
    files: Files = {}
    for number, (workload, arm) in enumerate(cells):
        run.tell("trace", f"{arm} on {workload.id}", number, len(cells))
        file = folders.trace_file(folder, workload.id, arm.implementation)
        failed = _trace(run, workload, arm, file)
        if failed is None:
            files[workload.id, arm] = file
        else:
            run.note(failed)
    run.tell("trace", "", len(cells), len(cells))
    return files


def _trace(run: Run, workload: Workload, arm: Arm, file: Path) -> CellFailed | None:
    """Trace one cell; how it failed, or None."""
    if not run.crew.is_at_work:
        run.fresh_worker()
    try:
        reply = run.crew.ask(Trace(workload=workload, spec=run.specs[arm], file=str(file.resolve())))
    except WorkerLostError as lost:
        reply = Failed(status=lost.status, message=str(lost))
    if isinstance(reply, Failed):
        return CellFailed(
            workload=workload.id, implementation=arm.implementation, status=reply.status, message=reply.message
        )
    assert isinstance(reply, Traced)
    return None
