"""Stages of the search for the fastest: a shortlist by prediction, and a search for crossovers along an axis."""

import math
from collections.abc import Iterator, Mapping, Sequence

from attnbench.processes import messages
from attnbench.processes.stages import Session, check_cell, named
from attnbench.statistics.crossover import Point, following, point
from attnbench.statistics.effects import numbers
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import by_process
from attnbench.statistics.verdict import FEWEST_PROCESSES, LOOKS
from attnbench.storage.events import CellChecked, Ladder, Plan
from attnbench.storage.fold import State
from attnbench.storage.records import Arm, Status
from attnbench.timing.schedule import SPENT, Live, Step
from attnbench.units import show, significant

TOO_SLOW = 2.5
"""Uncertainty of predictions: implementations slower than this multiple of the fastest are not tried."""
NUM_PREDICTIONS = 2
"""Predictions of a call that looks slow: one late reading must not exclude an implementation."""
MOST_PROCESSES, POINT_S = LOOKS[2], 6.0
"""Limits for one value of a search: processes, and seconds once there are enough processes for a verdict."""
CALLS_AT_A_VALUE = 60
"""A value is sampled only if this many calls fit into the remaining time, checks included."""
SEARCHED = "every search came to its end"
Steps = Iterator[Step]


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

    Bisects the values until the crossover is bracketed (statistics/crossover.py). Each visit is a fresh process. See
    timing/schedule.py for strategies.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.plan = session, session.plan
        self.reason = ""
        self.until_s = 0.0  # end of the current search
        self.gauge = InterferenceGauge()
        self._steps: Steps | None = None
        self._workloads = {each.id: each for each in session.plan.workloads}

    def next(self, state: State, live: Live, now_s: float = 0.0) -> Step | None:  # noqa: ARG002 - the signature of Strategy
        """The next visit."""
        self._steps = self._steps or self._all(state)
        step = next(self._steps, None)
        if step is None:
            self.reason = SPENT if now_s >= self.plan.budget_s else SEARCHED
        return step

    def _all(self, state: State) -> Steps:
        """Search every pair of every ladder, each in an equal share of the remaining time."""
        searches = [(ladder, pair) for ladder in self.plan.ladders for pair in ladder.pairs]
        for number, (ladder, names) in enumerate(searches):
            now_s = self.session.elapsed_s
            self.until_s = now_s + (self.plan.budget_s - now_s) / (len(searches) - number)
            yield from self._halve(state, ladder, [Arm(implementation=name) for name in names])

    def _halve(self, state: State, ladder: Ladder, pair: Sequence[Arm]) -> Steps:
        """Bisect until nothing more can be learned, or the time is over."""
        allowed = list(ladder.values)
        while len(allowed) > 1 and self.session.elapsed_s < self.until_s:
            seen = {value: self._point(state, ladder.by_value[value], pair) for value in allowed}
            value = following({value: known for value, known in seen.items() if known is not None}, allowed)
            if value is None:
                return
            workload, start_s = ladder.by_value[value], self.session.elapsed_s
            self._check(state, workload, pair)
            while len(state.live(workload, pair)) == len(pair) and not self._is_enough(state, workload, pair, start_s):
                yield Step(workload=workload, arms=tuple(pair), is_fresh=True)
            if len(state.live(workload, pair)) < len(pair):
                # values too large for the remaining time, and unsupported ones, end the ladder
                allowed = [each for each in allowed if (each < value if value > allowed[0] else each > value)]

    def _is_enough(self, state: State, workload: str, pair: Sequence[Arm], start_s: float) -> bool:
        """Whether the faster arm at a value is known, or the time for it since `start_s` is spent."""
        now_s = self.session.elapsed_s
        if now_s > self.until_s + POINT_S:  # interference may discard every block
            return True
        known = self._point(state, workload, pair)
        if known is None:
            return False
        if (known.sign or known.num_processes >= MOST_PROCESSES) and now_s > start_s:
            return True
        return known.num_processes >= FEWEST_PROCESSES and now_s > min(start_s + POINT_S, self.until_s)

    def _check(self, state: State, workload: str, arms: Sequence[Arm]) -> None:
        """Check all cells without a status."""
        for arm in arms:
            if (workload, arm) not in state.status:
                left_s = max(0.0, self.until_s - self.session.elapsed_s)
                limit_s = min(self.plan.call_limit_s, left_s / CALLS_AT_A_VALUE)
                share = min(1.0, self.session.elapsed_s / max(self.plan.budget_s, 1e-9))
                self.session.show_progress("search", f"{arm} on {workload}", share, 1.0)
                check_cell(self.session, self._workloads[workload], arm, call_limit_s=limit_s)

    def _point(self, state: State, workload: str, pair: Sequence[Arm]) -> Point | None:
        """The ratio of two arms on a workload; None without a common block."""
        discarded = self.gauge.follow(state.probes).get(workload, ())
        ratios = by_process(numbers(state.samples.get(workload, {}), pair[0], pair[1], discarded))
        return point([*ratios.values()], self.plan.num_searches) if ratios else None
