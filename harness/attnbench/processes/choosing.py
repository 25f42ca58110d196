"""Stages of the search for the fastest: a shortlist by prediction, and a search for crossovers along an axis."""

import math
from collections.abc import Mapping, Sequence

from attnbench.processes import messages
from attnbench.processes.stages import Session, check_cell, named
from attnbench.statistics.crossover import Point, following, point
from attnbench.statistics.effects import numbers
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import by_process
from attnbench.statistics.verdict import LOOKS
from attnbench.storage.events import CellChecked, Ladder, Plan
from attnbench.storage.fold import State
from attnbench.storage.records import Arm, Status
from attnbench.timing.schedule import SPENT, Live, Step
from attnbench.units import show, significant

TOO_SLOW = 2.5
"""Uncertainty of predictions: implementations slower than this multiple of the fastest are not tried."""
NUM_PREDICTIONS = 2
"""Predictions of a call that looks slow: one late reading must not exclude an implementation."""
MOST_PROCESSES = LOOKS[2]
"""Processes for one value of a search."""
CALLS_AT_A_VALUE = 60
"""A value is sampled only if this many calls fit into the remaining time, checks included."""
SEARCHED = "every search came to its end"


def shortlist(session: Session) -> None:
    """For each workload, leave out implementations predicted to be too slow, and those beyond the plan's limit.

    The baseline stays, and so do calls too short to predict. A workload with a status already has its shortlist.
    """
    plan = session.plan
    for number, workload in enumerate(plan.asked):
        cells = plan.cells(workload)
        if any((workload.id, arm) in session.state.status for arm in cells):
            continue
        session.show_progress("predict", workload.id, number, len(plan.asked))
        out: dict[Arm, tuple[Status, str]] = {}
        seconds: dict[Arm, float] = {}
        slow = dict.fromkeys(cells, "")
        for _ in range(NUM_PREDICTIONS):
            for arm in slow:
                fields = session.limited(workload, arm) | {"is_rough": False}
                reply = session.ask(messages.Prepare(**fields))
                if isinstance(reply, messages.Prepared):
                    seconds[arm] = min(seconds.get(arm, math.inf), reply.call_s or 0.0)
                elif isinstance(reply, messages.Failed) and arm not in seconds:
                    out[arm] = reply.status, reply.message
            slow = _too_slow(plan, seconds)
        out |= {arm: (Status.timeout, why) for arm, why in slow.items()}
        for arm, (status, message) in out.items():
            fields = named(workload, arm) | {"status": status, "message": message, "is_outpaced": arm in slow}
            session.record(CellChecked(**fields, is_predicted=True))


def _too_slow(plan: Plan, seconds: Mapping[Arm, float]) -> dict[Arm, str]:
    """The arms that are not tried, with reasons, among those with a predicted time of a call."""
    slow: dict[Arm, str] = {}
    order = sorted(seconds, key=seconds.__getitem__)
    for place, arm in enumerate(order if plan.shortlist else []):
        factor = seconds[arm] / seconds[order[0]] if seconds[order[0]] else 1.0
        if seconds[arm] and (factor > TOO_SLOW or place >= plan.shortlist) and not plan.is_reference(arm):
            times = f"{significant(factor, 2)}x slower than {order[0]}"
            slow[arm] = f"predicted {show(seconds[arm], 's')} for one call, {times}: not tried"
    return slow


class Search:
    """Strategy that searches each ladder for the values between which the two implementations of a pair change places.

    Each pass is a fresh process that visits one value of each unfinished search. A search stays at a value until the
    faster implementation is known there, or all its processes are used, and then bisects (statistics/crossover.py).
    """

    def __init__(self, session: Session) -> None:
        self.session, self.plan, self.reason = session, session.plan, ""
        self.gauge = InterferenceGauge()
        self._pass: dict[str, dict[Arm, None]] = {}  # visits left for the current process
        self._workloads = {each.id: each for each in session.plan.workloads}

    def next(self, state: State, live: Live, now_s: float = 0.0) -> Step | None:  # noqa: ARG002 - the signature of Strategy
        """The next visit."""
        is_fresh = not self._pass
        for ladder in self.plan.ladders if is_fresh else ():
            for names in ladder.pairs:
                pair = [Arm(implementation=name) for name in names]
                if workload := self._place(state, ladder, pair):
                    self._pass.setdefault(workload, {}).update(dict.fromkeys(pair))
        if not self._pass or self._is_spent:
            self.reason = SPENT if self._is_spent else SEARCHED
            return None
        workload, arms = self._pass.popitem()
        return Step(workload=workload, arms=tuple(arms), is_fresh=is_fresh)

    @property
    def _is_spent(self) -> bool:
        return self.session.elapsed_s >= self.plan.budget_s

    def _place(self, state: State, ladder: Ladder, pair: Sequence[Arm]) -> str:
        """The workload that a search visits next; "" at its end."""
        allowed = list(ladder.values)
        while len(allowed) > 1 and not self._is_spent:
            discarded, seen = self.gauge.follow(state.probes), dict[int, Point]()
            for value in allowed:
                workload = ladder.by_value[value]
                logs = numbers(state.samples.get(workload, {}), pair[0], pair[1], discarded.get(workload, ()))
                if ratios := by_process(logs):
                    seen[value] = point([*ratios.values()], self.plan.num_searches)
            open_ones = [
                each for each, known in seen.items() if not known.sign and known.num_processes < MOST_PROCESSES
            ]
            chosen = open_ones[0] if open_ones else following(seen, allowed)
            if chosen is None:
                return ""
            workload = ladder.by_value[chosen]
            self._check(state, workload, pair)
            if len(state.live(workload, pair)) == len(pair):
                return workload
            # values too large for the remaining time, and unsupported ones, end the ladder
            allowed = [each for each in allowed if (each < chosen if chosen > allowed[0] else each > chosen)]
        return ""

    def _check(self, state: State, workload: str, arms: Sequence[Arm]) -> None:
        """Check all cells without a status."""
        for arm in arms:
            if (workload, arm) not in state.status:
                left_s = max(0.0, self.plan.budget_s - self.session.elapsed_s)
                limit_s = min(self.plan.call_limit_s, left_s / CALLS_AT_A_VALUE)
                share = 1.0 - left_s / max(self.plan.budget_s, 1e-9)
                self.session.show_progress("search", f"{arm} on {workload}", share, 1.0)
                check_cell(self.session, self._workloads[workload], arm, call_limit_s=limit_s)
