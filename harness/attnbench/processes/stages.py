"""The stages of a session but for timing: check each cell, see what runs in it, measure ceilings, trace.

Each is a function of a session, and passes over what the journal already holds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from attnbench import plugins
from attnbench.processes.messages import Check, Failed, MeasureCeilings, Observe, Profile, Trace
from attnbench.processes.session import Session
from attnbench.storage.events import CeilingsMeasured, CellChecked, CellFailed, CellMeasured, CellProfiled
from attnbench.storage.records import Arm, Ceilings
from attnbench.tracing import folders
from attnbench.workloads.workload import Workload

CEILINGS_SHARE = 0.05
CEILINGS_S = 1.0
"""What the ceilings of one place may cost beyond their fewest rounds: this, or their part of that share of the budget
where it is less."""


def check_cells(session: Session) -> None:
    """Bring every cell to a status."""
    plan, cells = session.plan, session.cells
    for number, (workload, arm) in enumerate(cells):
        if (workload.id, arm) not in session.state.status:
            session.show_progress("check", f"{arm} on {workload.id}", number, len(cells))
            request = Check(
                **_cell(session, workload, arm),
                call_limit_s=plan.call_limit_s,
                memory_limit_bytes=plan.memory_limit_bytes,
                seed=plan.seed,
            )
            reply = session.ask(request)
            if isinstance(reply, Failed):
                reply = CellChecked(**request.names, status=reply.status, message=reply.message)
            assert isinstance(reply, CellChecked)
            session.record(reply)
    session.show_progress("check", "", len(cells), len(cells))


def observe_cells(session: Session, metrics: Sequence[str], *, with_operators: bool) -> None:
    """See which operators run in each live cell, and read each metric that has a pass of its own, cell by cell.

    One after the other of the same cell, since both are read from one recorded call where the device allows it.
    """
    known = plugins.plugs("attnbench.metrics", "METRIC")
    cells = session.live_cells
    for number, (workload, arm) in enumerate(cells):
        requests: dict[str, Profile | Observe] = {}
        if with_operators and (workload.id, arm) not in session.state.profiled:
            requests["operators"] = Profile(**_cell(session, workload, arm))
        for metric in metrics:
            if ((workload.id, arm), metric) not in session.state.observed and known[metric].fits(workload):
                requests[metric] = Observe(**_cell(session, workload, arm), metric=metric)
        for what, request in requests.items():
            if session.state.live(workload.id, [arm]):
                session.show_progress("observe", f"{what} of {arm} on {workload.id}", number, len(cells))
                reply = session.ask(request)
                assert isinstance(reply, CellProfiled | CellMeasured | Failed)
                session.record(failed_cell(workload, arm, reply) if isinstance(reply, Failed) else reply)


def measure_ceilings(session: Session) -> None:
    """Measure each device, dtype and number of threads that is going to be timed.

    What cannot be measured is recorded with its reason, and times stand alone.
    """
    live = [workload for workload in session.plan.workloads if session.state.live(workload.id, session.specs)]
    places = {workload.place: workload for workload in reversed(live)}
    for number, (place, workload) in enumerate(places.items()):
        if place in session.state.ceilings:
            continue
        device, dtype, num_threads = place
        session.show_progress("ceilings", f"{device}, {dtype}", number, len(places))
        session.require_worker()
        start_s = session.clock()
        limit_s = min(CEILINGS_S, CEILINGS_SHARE * session.plan.budget_s / len(places))
        reply = session.ask(MeasureCeilings(workload=workload, limit_s=limit_s))
        if isinstance(reply, Failed):
            none = Ceilings(device=device, dtype=dtype, num_threads=num_threads, message=reply.message)
            reply = CeilingsMeasured(ceilings=none)
        assert isinstance(reply, CeilingsMeasured)
        session.record(msgspec.structs.replace(reply, spent_s=session.clock() - start_s))


def trace_cells(session: Session, folder: Path) -> None:
    """Trace each live cell into its file below `folder` (tracing/folders.py).

    A trace shares no pass with any timing, and no folder with any run: tracing slows a call down.
    """
    cells = session.live_cells
    for number, (workload, arm) in enumerate(cells):
        session.show_progress("trace", f"{arm} on {workload.id}", number, len(cells))
        file = folders.trace_file(folder, workload.id, arm.implementation)
        reply = session.ask(Trace(**_cell(session, workload, arm), file=str(file.resolve())))
        if isinstance(reply, Failed):
            session.record(failed_cell(workload, arm, reply))
    session.show_progress("trace", "", len(cells), len(cells))


def failed_cell(workload: Workload, arm: Arm, failed: Failed) -> CellFailed:
    """The event that ends a cell which had passed its check."""
    names = {"workload": workload.id, "implementation": arm.implementation, "side": arm.side}
    return CellFailed(**names, status=failed.status, message=failed.message)


def _cell(session: Session, workload: Workload, arm: Arm) -> dict[str, Any]:
    return {"workload": workload, "arm": arm, "spec": session.specs[arm]}
