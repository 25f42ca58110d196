"""Stages of the search for the fastest: a shortlist by prediction, and a search for crossovers along an axis.

Cells predicted to be clearly too slow, or slower than enough others, are not tried. Those on the shortlist are checked
as usual.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attnbench.processes import messages
from attnbench.processes.stages import Session, Stage, check_cell, named, record_check
from attnbench.statistics.choice import Standing, standing
from attnbench.statistics.crossover import Point, following, point
from attnbench.statistics.effects import numbers
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import by_process
from attnbench.statistics.verdict import FEWEST_PROCESSES, LOOKS
from attnbench.storage import events
from attnbench.storage.events import Ladder
from attnbench.storage.fold import State
from attnbench.storage.records import Arm, Status
from attnbench.timing.schedule import SPENT, Live, Step
from attnbench.units import show, significant
from attnbench.workloads.workload import Workload

TOO_SLOW = 2.5
"""Uncertainty of predictions: implementations slower than this multiple of the fastest are not tried."""
MOST_PROCESSES, POINT_S = LOOKS[2], 6.0
"""Limits for one value of a search: processes, and seconds once there are enough processes for a verdict."""
CALLS_AT_A_VALUE = 60
"""A value is sampled only if this many calls fit into the remaining time, checks included."""
MOST_RIVALS = 4
"""Rivals at other values: the fastest at the base, and those with the lowest predictions there."""
SEARCHED = "every search came to its end"
Steps = Iterator[Step]


class ShortlistStage(Stage):
    """For each workload, leave out implementations predicted to be too slow, and all beyond the plan's number.

    The baseline stays. A workload with a status already has its shortlist.
    """

    def run(self, session: Session) -> str:
        """See Stage."""
        plan = session.plan
        for number, workload in enumerate(plan.asked):
            cells = plan.cells(workload)
            if any((workload.id, arm) in session.state.status for arm in cells):
                continue
            session.show_progress("predict", workload.id, number, len(plan.asked))
            seconds, failed = _predictions(session, workload, plan.call_limit_s)
            again = _predictions(session, workload, plan.call_limit_s, _too_slow(session, seconds))[0]  # a retry
            seconds |= {arm: min(seconds[arm], call_s) for arm, call_s in again.items()}
            out = _too_slow(session, seconds)
            for arm, reply in failed.items():
                _leave_out(session, workload, arm, status=reply.status, message=reply.message)
            for arm, why in out.items():
                _leave_out(session, workload, arm, status=Status.timeout, message=why, is_outpaced=True)
        return ""


def _predictions(
    session: Session, workload: Workload, call_limit_s: float, arms: Iterable[Arm] | None = None
) -> tuple[dict[Arm, float], dict[Arm, messages.Failed]]:
    """The predicted seconds of a call of each arm, 0 if it is too short to predict; and the arms that fail."""
    seconds: dict[Arm, float] = {}
    failed: dict[Arm, messages.Failed] = {}
    for arm in session.plan.cells(workload) if arms is None else arms:
        reply = session.prepare(workload, arm, call_limit_s=call_limit_s, is_rough=False)
        if isinstance(reply, messages.Prepared):
            seconds[arm] = reply.call_s or 0.0
        else:
            failed[arm] = reply
    return seconds, failed


def _too_slow(session: Session, seconds: Mapping[Arm, float]) -> dict[Arm, str]:
    """The arms that are not tried, with reasons, among those with a predicted time of a call.

    Calls too short to predict are tried: nothing suggests that they are slower.
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


def _leave_out(session: Session, workload: Workload, arm: Arm, **conclusion: Any) -> None:  # noqa: ANN401 - of CellChecked
    session.record(events.CellChecked(**named(workload, arm), **conclusion, is_predicted=True))


class Search:
    """Strategy that searches each ladder for the values between which two implementations change places.

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
        """Search every ladder, and every pair of it, each in an equal share of the remaining time."""
        ladders = self.plan.ladders
        for number, ladder in enumerate(ladders):
            end_s = self._share(self.plan.budget_s, len(ladders) - number)
            if not ladder.pairs:
                yield from self._around_base(state, ladder)
            for place, (one, other) in enumerate(ladder.pairs):
                self._share(end_s, len(ladder.pairs) - place)
                yield from self._halve(state, ladder, (one, other), ladder.values)

    def _share(self, end_s: float, number: int) -> float:
        """Give the next of `number` searches its share of the time until `end_s`; return its end."""
        now_s = self.session.elapsed_s
        self.until_s = now_s + (end_s - now_s) / number
        return self.until_s

    def _halve(self, state: State, ladder: Ladder, names: tuple[str, str], values: Sequence[int]) -> Steps:
        """Bisect until nothing more can be learned, or the time is over."""
        pair, allowed = [Arm(implementation=name) for name in names], list(values)
        while len(allowed) > 1 and self.session.elapsed_s < self.until_s:
            value = following(self._points(state, ladder, pair, allowed), allowed)
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
                self._show_progress(f"{arm} on {workload}")
                checked = check_cell(self.session, self._workloads[workload], arm, call_limit_s=limit_s)
                record_check(self.session, self._workloads[workload], arm, checked)

    def _point(self, state: State, workload: str, pair: Sequence[Arm]) -> Point | None:
        """The ratio of two arms on a workload; None without a common block."""
        discarded = self.gauge.follow(state.probes).get(workload, ())
        ratios = by_process(numbers(state.samples.get(workload, {}), pair[0], pair[1], discarded))
        return point([*ratios.values()], self.plan.num_searches) if ratios else None

    def _points(self, state: State, ladder: Ladder, pair: Sequence[Arm], values: Sequence[int]) -> dict[int, Point]:
        """The ratios at all values with common blocks of both."""
        points = {value: self._point(state, ladder.by_value[value], pair) for value in values}
        return {value: known for value, known in points.items() if known is not None}

    def _around_base(self, state: State, ladder: Ladder) -> Steps:
        """Find whether another arm is fastest towards the ends of the ladder, and from which value on."""
        stands = self._standing(state, ladder.base)
        if stands is None:
            return
        start, end_s = ladder.workloads.index(ladder.base), self.until_s
        ways = [each for each in (ladder.values[: start + 1], ladder.values[start:][::-1]) if len(each) > 1]
        for number, way in enumerate(ways):  # from an end to the base
            self._share(end_s, len(ways) - number)
            place = 0
            while place < len(way) - 1:
                workload = ladder.by_value[way[place]]
                yield from self._compare(state, workload, stands)
                live = state.live(workload, self.plan.specs)
                if state.num_visits[workload] >= FEWEST_PROCESSES and len(live) > 1:
                    break
                place = (place + len(way)) // 2
            if place < len(way) - 1:
                there = self._standing(state, ladder.by_value[way[place]])
                if there is not None and there.leader != stands.leader:
                    yield from self._halve(state, ladder, (stands.leader, there.leader), sorted(way[place:]))

    def _standing(self, state: State, workload: str) -> Standing | None:
        discarded = self.gauge.follow(state.probes).get(workload, ())
        live = state.live(workload, self.plan.specs)
        return standing(self.plan, state.samples.get(workload, {}), live, discarded)

    def _compare(self, state: State, workload: str, stands: Standing) -> Steps:
        """Visit the leader at the base and its rivals at another value a few times.

        Rivals with calls too short to predict are sorted by their times at the base.
        """
        left_s = self.until_s - self.session.elapsed_s
        if left_s <= 0:
            return
        baseline = Arm(implementation=self.plan.baseline)
        self._show_progress(f"the fastest on {workload}")
        seconds = _predictions(self.session, self._workloads[workload], left_s / CALLS_AT_A_VALUE)[0]
        places = {name: place for place, name in enumerate(stands.others)}
        order = sorted(seconds, key=lambda arm: (seconds[arm], places.get(arm.implementation, len(places))))
        rivals = [*dict.fromkeys([Arm(implementation=stands.leader), baseline, *order])][:MOST_RIVALS]
        self._check(state, workload, rivals)
        while state.num_visits[workload] < FEWEST_PROCESSES:
            live = state.live(workload, rivals)
            if len(live) <= 1 or baseline not in live:
                return
            yield Step(workload=workload, arms=tuple(live), is_fresh=True)

    def _show_progress(self, cell: str) -> None:
        share = min(1.0, self.session.elapsed_s / max(self.plan.budget_s, 1e-9))
        self.session.show_progress("search", cell, share, 1.0)
