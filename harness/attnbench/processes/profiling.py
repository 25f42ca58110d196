"""The walk of `attnbench profile`: check each cell, then trace what agrees; a journal says what became of each.

A trace shares no pass with any timing, and no folder with any run: tracing slows a call down.
"""

from dataclasses import dataclass
from pathlib import Path

from attnbench.processes.messages import Failed, Trace, Traced
from attnbench.processes.revision import commit
from attnbench.processes.session import Run, Watch, crew_of, now
from attnbench.processes.worker_client import WorkerLostError
from attnbench.storage import journal as store
from attnbench.storage.events import SCHEMA, CellFailed, Plan, RunFinished, RunStarted
from attnbench.storage.records import Record
from attnbench.tracing import folders
from attnbench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What `profile` leaves: the outcome of every cell, and the file of each that has one."""

    results: store.Results
    files: dict[tuple[str, str], Path]  # by workload id and implementation

    def file_of(self, record: Record) -> Path | None:
        """The trace of a cell, None where it has none."""
        return self.files.get((record.workload.id, record.implementation))


def execute(plan: Plan, folder: Path, watch: Watch) -> Traces:
    """Check every cell, trace those that agree, and return what was found.

    Raises:
        ValueError: the folder cannot be written, or no worker can start.
    """
    with store.Journal(folder) as journal, crew_of(plan, folder) as crew:
        run = Run(plan, journal, crew, watch)
        run.note(RunStarted(schema=SCHEMA, run=folder.name, time=now(), commit=commit(), plan=plan))
        run.fresh_worker()
        run.check_all()
        files = _trace_all(run, folder)
        run.note(RunFinished(time=now(), elapsed_s=run.elapsed_s, reason="", counters=run.count()))
    return Traces(results=store.read(folder), files=files)


def _trace_all(run: Run, folder: Path) -> dict[tuple[str, str], Path]:
    cells = [(each, name) for each in run.plan.workloads for name in run.state.live(each.id, run.specs)]
    files: dict[tuple[str, str], Path] = {}
    for number, (workload, name) in enumerate(cells):
        run.tell("trace", f"{name} on {workload.id}", number, len(cells))
        file = folders.trace_file(folder, workload.id, name)
        failed = _trace(run, workload, name, file)
        if failed is None:
            files[workload.id, name] = file
        else:
            run.note(failed)
    run.tell("trace", "", len(cells), len(cells))
    return files


def _trace(run: Run, workload: Workload, name: str, file: Path) -> CellFailed | None:
    """Trace one cell; how it failed, or None."""
    if not run.crew.is_at_work:
        run.fresh_worker()
    try:
        reply = run.crew.ask(Trace(workload=workload, spec=run.specs[name], file=str(file.resolve())))
    except WorkerLostError as lost:
        reply = Failed(arm=name, status=lost.status, message=str(lost))
    if isinstance(reply, Failed):
        return CellFailed(workload=workload.id, implementation=name, status=reply.status, message=reply.message)
    assert isinstance(reply, Traced)
    return None


def summary(found: Traces) -> list[dict[str, object]]:
    """What a program wants to know of each cell."""
    return [
        {
            "workload": record.workload.id,
            "implementation": record.implementation,
            "status": str(record.status),
            "message": record.message,
            "trace": None if (file := found.file_of(record)) is None else str(file),
        }
        for record in found.results.records
    ]
