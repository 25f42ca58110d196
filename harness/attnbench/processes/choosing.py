"""Before the fastest is looked for: a shortlist by prediction, and what a search asks of its session.

What is predicted to be clearly too slow, or slower than enough others, is not tried. Those on the shortlist are checked
like any others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attnbench.processes import messages
from attnbench.processes.stages import Session, check_cell
from attnbench.storage import events
from attnbench.storage.records import Arm, Status
from attnbench.units import show, significant
from attnbench.workloads.workload import Workload

TOO_SLOW = 2.5
"""Predictions are this uncertain: who is predicted to take more than so many times the fastest's time is not tried."""


def shortlist(session: Session) -> None:
    """Leave out, of each workload, whoever is predicted to be too slow, and all beyond the plan's number.

    The baseline stays. A workload that has a status already has its shortlist.
    """
    plan = session.plan
    for number, workload in enumerate(plan.asked):
        cells = plan.cells(workload)
        if any((workload.id, arm) in session.state.status for arm in cells):
            continue
        session.show_progress("predict", workload.id, number, len(plan.asked))
        seconds, failed = _predictions(session, workload, plan.call_limit_s)
        again = _predictions(session, workload, plan.call_limit_s, _too_slow(session, seconds))[0]  # it may be busy
        seconds |= {arm: min(seconds[arm], call_s) for arm, call_s in again.items()}
        out = _too_slow(session, seconds)
        for arm, reply in failed.items():
            _leave_out(session, workload, arm, reply.status, reply.message, is_outpaced=False)
        for arm, why in out.items():
            _leave_out(session, workload, arm, Status.timeout, why, is_outpaced=True)


def _predictions(
    session: Session, workload: Workload, call_limit_s: float, arms: Iterable[Arm] | None = None
) -> tuple[dict[Arm, float], dict[Arm, messages.Failed]]:
    """The predicted seconds of a call of each arm, 0 where it is so short that nobody asks; and who fails."""
    seconds: dict[Arm, float] = {}
    failed: dict[Arm, messages.Failed] = {}
    for arm in session.plan.cells(workload) if arms is None else arms:
        request = messages.Prepare(
            **session.request_of(workload, arm),
            call_limit_s=call_limit_s,
            memory_limit_bytes=session.plan.memory_limit_bytes,
        )
        reply = session.ask(request)
        if isinstance(reply, messages.Prepared):
            seconds[arm] = reply.call_s or 0.0
        else:
            assert isinstance(reply, messages.Failed)
            failed[arm] = reply
    return seconds, failed


def _too_slow(session: Session, seconds: Mapping[Arm, float]) -> dict[Arm, str]:
    """Who is not tried, and why, of those with a predicted time of a call.

    Whose call is so short that no time is predicted is tried: nothing says that it is slower.
    """
    if not session.plan.shortlist:
        return {}
    order = sorted(seconds, key=lambda arm: seconds[arm])
    out = {}
    for place, arm in enumerate(order):
        first = order[0]
        factor = seconds[arm] / seconds[first] if seconds[first] else 1.0
        is_slow = seconds[arm] and (factor > TOO_SLOW or place >= session.plan.shortlist)
        if is_slow and not session.plan.is_reference(arm):
            times = f"{significant(factor, 2)}x slower than {first}"
            out[arm] = f"predicted {show(seconds[arm], 's')} for one call, {times}: not tried"
    return out


def _leave_out(  # noqa: PLR0913 - what is recorded of it
    session: Session, workload: Workload, arm: Arm, status: Status, why: str, *, is_outpaced: bool
) -> None:
    session.record(
        events.CellChecked(
            workload=workload.id,
            implementation=arm.implementation,
            side=arm.side,
            status=status,
            message=why,
            is_predicted=True,
            is_outpaced=is_outpaced,
        )
    )


@dataclass(frozen=True)
class SessionDesk:
    """What a search asks of its session."""

    session: Session

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken so far."""
        return self.session.elapsed_s

    def check(self, workload: Workload, arm: Arm, call_limit_s: float) -> None:
        """Give the cell a status."""
        self._show(f"{arm} on {workload.id}")
        check_cell(self.session, workload, arm, call_limit_s=call_limit_s)

    def predict(self, workload: Workload, call_limit_s: float) -> dict[Arm, float]:
        """The predicted seconds of a call of each arm."""
        self._show(f"the fastest on {workload.id}")
        return _predictions(self.session, workload, call_limit_s)[0]

    def _show(self, cell: str) -> None:
        share = min(1.0, self.session.elapsed_s / max(self.session.plan.budget_s, 1e-9))
        self.session.show_progress("search", cell, share, 1.0)
