"""The stages of a session before and beside timing: check each cell, see what runs in it, measure ceilings, trace.

Each is a function of a session, and passes over what the journal already holds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench import plugins
from attnbench.processes.messages import (
    CeilingsReply,
    Check,
    Checked,
    Failed,
    MeasureCeilings,
    Observe,
    Observed,
    Profile,
    Profiled,
    Trace,
)
from attnbench.processes.session import Session
from attnbench.storage.ceilings import Ceilings
from attnbench.storage.events import CeilingsMeasured, CellChecked, CellFailed, CellMeasured, CellProfiled
from attnbench.storage.records import Arm
from attnbench.tracing import folders
from attnbench.workloads.workload import Workload

CEILINGS_SHARE = 0.05
CEILINGS_S = 1.0
"""What the ceilings of one place may cost beyond their fewest rounds: this, or their part of that share of the budget
where it is less."""


def check_cells(session: Session) -> None:
    """Bring every cell to a status."""
    cells = session.cells
    for number, (workload, arm) in enumerate(cells):
        if (workload.id, arm) not in session.state.status:
            session.show_progress("check", f"{arm} on {workload.id}", number, len(cells))
            session.record(_check(session, workload, arm))
    session.show_progress("check", "", len(cells), len(cells))


def _check(session: Session, workload: Workload, arm: Arm) -> CellChecked:
    reply = session.ask(
        Check(
            workload=workload,
            spec=session.specs[arm],
            side=arm.side,
            call_limit_s=session.plan.call_limit_s,
            memory_limit_bytes=session.plan.memory_limit_bytes,
            seed=session.plan.seed,
        )
    )
    if isinstance(reply, Failed):
        return CellChecked(**_names(workload, arm), status=reply.status, message=reply.message)
    assert isinstance(reply, Checked)
    return CellChecked(
        **_names(workload, arm),
        status=reply.status,
        message=reply.message,
        is_predicted=reply.is_predicted,
        agreement=reply.agreement,
        check_s=reply.check_s,
        executed_flops=reply.executed_flops,
    )


def observe_cells(session: Session, metrics: Sequence[str], *, with_operators: bool) -> None:
    """See which operators run in each live cell, and read each metric that has a pass of its own, cell by cell.

    One after the other of the same cell, since both are read from one recorded call where the device allows it.
    """
    known = plugins.plugs("attnbench.metrics", "METRIC")
    cells = [cell for cell in session.cells if session.is_live(*cell)]
    for number, (workload, arm) in enumerate(cells):
        names = _names(workload, arm)
        request: dict[str, Any] = {"workload": workload, "spec": session.specs[arm], "side": arm.side}
        if with_operators and (workload.id, arm) not in session.state.profiled:
            session.show_progress("observe", f"operators of {arm} on {workload.id}", number, len(cells))
            reply = session.ask(Profile(**request))
            assert isinstance(reply, Profiled | Failed)
            session.record(
                failed_cell(workload, arm, reply)
                if isinstance(reply, Failed)
                else CellProfiled(**names, operators=reply.operators)
            )
        for metric in metrics:
            is_known = ((workload.id, arm), metric) in session.state.observed or not known[metric].fits(workload)
            if not is_known and session.is_live(workload, arm):
                session.show_progress("observe", f"{metric} of {arm} on {workload.id}", number, len(cells))
                answer = session.ask(Observe(**request, metric=metric))
                assert isinstance(answer, Observed | Failed)
                session.record(
                    failed_cell(workload, arm, answer)
                    if isinstance(answer, Failed)
                    else CellMeasured(**names, measurement=answer.measurement)
                )


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
        assert isinstance(reply, CeilingsReply | Failed)
        ceilings = (
            Ceilings(device=device, dtype=dtype, num_threads=num_threads, message=reply.message)
            if isinstance(reply, Failed)
            else reply.ceilings
        )
        session.record(CeilingsMeasured(ceilings=ceilings, spent_s=session.clock() - start_s))


def trace_cells(session: Session, folder: Path) -> None:
    """Trace each live cell into its file below `folder` (tracing/folders.py).

    A trace shares no pass with any timing, and no folder with any run: tracing slows a call down.
    """
    cells = [cell for cell in session.cells if session.is_live(*cell)]
    for number, (workload, arm) in enumerate(cells):
        session.show_progress("trace", f"{arm} on {workload.id}", number, len(cells))
        file = folders.trace_file(folder, workload.id, arm.implementation)
        reply = session.ask(Trace(workload=workload, spec=session.specs[arm], side=arm.side, file=str(file.resolve())))
        if isinstance(reply, Failed):
            session.record(failed_cell(workload, arm, reply))
    session.show_progress("trace", "", len(cells), len(cells))


def failed_cell(workload: Workload, arm: Arm, failed: Failed) -> CellFailed:
    """The event that ends a cell which had passed its check."""
    return CellFailed(**_names(workload, arm), status=failed.status, message=failed.message)


def _names(workload: Workload, arm: Arm) -> dict[str, Any]:
    """What names a cell in an event."""
    return {"workload": workload.id, "implementation": arm.implementation, "side": arm.side}
