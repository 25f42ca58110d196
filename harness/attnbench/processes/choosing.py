"""Stages that answer "which is the fastest, and where does that change": shortlist, choose, search.

The shortlist is by prediction: what is clearly too slow, or slower than enough others, is not tried. Those on it are
checked like any others. Choosing visits whoever may still be the fastest, and searching halves the way between two
values of an axis until it is known between which of them two change places (statistics/crossover.py). What comes next
follows from the journal alone, so that a search that was killed goes on where it was.
"""

from collections.abc import Iterable, Mapping, Sequence

from attnbench.processes import messages
from attnbench.processes.stages import SPENT, Session, TimingStage, check_cell
from attnbench.statistics.choice import Standing, standing
from attnbench.statistics.crossover import Point, following, point
from attnbench.statistics.intervals import by_process
from attnbench.statistics.verdict import FEWEST_PROCESSES, LOOKS
from attnbench.storage import events
from attnbench.storage.events import Ladder
from attnbench.storage.records import Arm, Status
from attnbench.timing.schedule import load_libraries, numbers
from attnbench.units import show, significant
from attnbench.workloads.workload import Workload

TOO_SLOW = 2.5
"""Predictions are this uncertain: who is predicted to take more than so many times the fastest's time is not tried."""
CHOOSING_SHARE = 0.75
"""Of the budget, at most, to know who is the fastest where it was asked; the rest is for where that changes."""
MOST_PROCESSES, POINT_S = LOOKS[2], 6.0
"""At one value of a search: no more processes, and no more seconds once there are enough to decide anything."""
CHOOSING_PROCESSES = 2 * FEWEST_PROCESSES
"""Of every workload that was asked about: half of them choose, and the others judge."""
CALLS_AT_A_VALUE = 60
"""A value is only looked at where so many calls fit into the time that is left, checks included."""
MOST_RIVALS = 4
"""So many are looked at elsewhere: the fastest where it was asked, and those that are predicted to be fastest there."""
ANSWERED = "the answer is clear"
SEARCHED = "every search came to its end"


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
            times = f"{significant(factor, 2)} times as long as {first}"
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


class Looking(TimingStage):
    """What choosing and searching share: a standing, and what is known at the values of a ladder."""

    def standing(self, workload: str) -> Standing | None:
        """Who is the fastest of a workload so far."""
        taken = self.state.samples.get(workload, {})
        live = self.state.live(workload, self.session.specs)
        baseline = Arm(implementation=self.plan.baseline)
        return standing(
            {arm.implementation: taken.get(arm, []) for arm in live},
            self.plan.baseline,
            control=taken.get(baseline.as_control(), []),
            discarded=self.state.gauge.discarded.get(workload, set()),
            smallest=self.plan.smallest_effect,
            error=self.plan.false_share,
        )

    def show(self, stage: str, cell: str) -> None:
        """Call the watcher."""
        self.session.show_progress(stage, cell, min(1.0, self.session.elapsed_s / max(self.plan.budget_s, 1e-9)), 1.0)


class Choosing(Looking):
    """Passes over whatever may be the fastest, of all workloads that were asked for, until that is clear."""

    def run(self) -> str:
        """A few processes of each, and then of those that are open; return why it ended."""
        load_libraries()
        while todo := self._todo():
            is_first = any(self.state.num_visits[each] < CHOOSING_PROCESSES for each in todo)
            if not is_first and self.session.elapsed_s > CHOOSING_SHARE * self.plan.budget_s:
                return SPENT
            self.session.start_worker()
            for workload, arms in todo.items():
                self.show("choose", f"{workload}: {', '.join(arm.implementation for arm in arms)}")
                self.visit(self.workloads[workload], arms)
        return ANSWERED if self.workloads else ""

    def _todo(self) -> dict[str, list[Arm]]:
        """By workload, what is to be visited: all at first, then the leader, what is open, and the baseline."""
        found = {}
        for workload in self.workloads:
            live = self.state.live(workload, self.session.specs)
            if self.state.num_visits[workload] < CHOOSING_PROCESSES:
                if live:
                    found[workload] = live
                continue
            stands = self.standing(workload)
            if stands is not None and stands.open:
                names = {stands.leader, self.plan.baseline, *stands.open}
                found[workload] = [arm for arm in live if arm.implementation in names]
        return found


class Searching(Looking):
    """Finds between which values of each ladder two implementations change places."""

    def run(self) -> str:
        """Search every ladder of the plan; return why it ended."""
        load_libraries()
        self.session.require_worker()
        share = len(self.plan.ladders)
        for number, ladder in enumerate(self.plan.ladders):
            self.until_s = self.session.elapsed_s + (self.plan.budget_s - self.session.elapsed_s) / (share - number)
            if ladder.pairs:
                pairs_left = len(ladder.pairs)
                end_s = self.until_s
                for place, (one, other) in enumerate(ladder.pairs):
                    now_s = self.session.elapsed_s
                    self.until_s = now_s + (end_s - now_s) / (pairs_left - place)
                    self._search(ladder, (Arm(implementation=one), Arm(implementation=other)), ladder.values)
            else:
                self._changes(ladder)
        return SPENT if self.session.elapsed_s >= self.plan.budget_s else SEARCHED

    def _search(self, ladder: Ladder, both: tuple[Arm, Arm], values: Sequence[int]) -> None:
        """Halve the way until nothing more can be learned, or the time is over."""
        allowed = list(values)
        while len(allowed) > 1 and self.session.elapsed_s < self.until_s:
            points = self.points(ladder, both, allowed)
            value = following(points, allowed)
            if value is None:
                return
            if not self._look(ladder, both, value):
                # what is too large for the time that is left, or not supported, ends the ladder there
                allowed = [each for each in allowed if (each < value) == (value > allowed[0])]

    def _look(self, ladder: Ladder, both: Sequence[Arm], value: int) -> bool:
        """Sample a value until it is known who is faster there. Returns whether it can be sampled at all."""
        workload = self._ready(ladder, both, value)
        if workload is None:
            return False
        start_s = self.session.elapsed_s
        while True:
            self.show("search", f"{both[0]} and {both[1]} at {ladder.axis} {value}")
            self.session.start_worker()
            self.visit(workload, both)
            if len(self.state.live(workload.id, both)) < len(both):
                return False
            known = self._point(workload.id, both[0], both[1])
            if known is not None and (known.sign or known.num_processes >= MOST_PROCESSES):
                return True
            now_s = self.session.elapsed_s
            is_enough = known is not None and known.num_processes >= FEWEST_PROCESSES
            if is_enough and (now_s > start_s + POINT_S or now_s > self.until_s):
                return True
            if now_s > self.until_s + POINT_S:  # interference may discard every block
                return True

    def _ready(self, ladder: Ladder, arms: Sequence[Arm], value: int) -> Workload | None:
        """The workload at that value, with each of the arms checked; None where one of them cannot take part."""
        workload = self._workload(ladder, value)
        left_s = max(0.0, self.until_s - self.session.elapsed_s)
        for arm in arms:
            if (workload.id, arm) not in self.state.status:
                self.show("search", f"{arm} at {ladder.axis} {value}")
                limit_s = min(self.plan.call_limit_s, left_s / CALLS_AT_A_VALUE)
                check_cell(self.session, workload, arm, call_limit_s=limit_s)
        return workload if len(self.state.live(workload.id, arms)) == len(arms) else None

    def _point(self, workload: str, one: Arm, other: Arm) -> Point | None:
        """What is known at a workload; None where no block has both."""
        taken = self.state.samples.get(workload, {})
        found = by_process(numbers(taken, one, other, self.state.gauge.discarded.get(workload, set())))
        return point([*found.values()], self.plan.num_searches) if found else None

    def points(self, ladder: Ladder, both: tuple[Arm, Arm], values: Sequence[int]) -> dict[int, Point]:
        """What is known at those values where both were sampled in common blocks."""
        found = {value: self._point(ladder.by_value[value], *both) for value in values}
        return {value: each for value, each in found.items() if each is not None}

    def _changes(self, ladder: Ladder) -> None:
        """Whether somebody else is the fastest towards the ends of the ladder; and if so, from where on."""
        stands = self.standing(ladder.base)
        if stands is None:
            return
        start, end_s = ladder.workloads.index(ladder.base), self.until_s
        ways = [each for each in (ladder.values[: start + 1], ladder.values[start:][::-1]) if len(each) > 1]
        for number, way in enumerate(ways):  # from an end to where it was asked
            now_s = self.session.elapsed_s
            self.until_s = now_s + (end_s - now_s) / (len(ways) - number)
            place = 0
            while place < len(way) - 1 and not self._sampled(ladder, stands, way[place]):
                place = (place + len(way)) // 2
            there = self.standing(ladder.by_value[way[place]]) if place < len(way) - 1 else None
            if there is not None and there.leader != stands.leader:
                both = (Arm(implementation=stands.leader), Arm(implementation=there.leader))
                self._search(ladder, both, sorted(way[place:]))

    def _sampled(self, ladder: Ladder, stands: Standing, value: int) -> bool:
        """Visit the leader and its rivals at that value a few times; whether that could be done.

        Of rivals whose calls are so short there that no time is predicted, those come first that are fast at the base.
        """
        left_s = self.until_s - self.session.elapsed_s
        if left_s <= 0:
            return False
        workload = self._workload(ladder, value)
        named = [Arm(implementation=name) for name in dict.fromkeys([stands.leader, self.plan.baseline])]
        self.show("search", f"who is fast at {ladder.axis} {value}")
        seconds, _ = _predictions(self.session, workload, left_s / CALLS_AT_A_VALUE)
        places = {name: place for place, name in enumerate(stands.others)}
        order = sorted(seconds, key=lambda arm: (seconds[arm], places.get(arm.implementation, len(places))))
        rivals = list(dict.fromkeys([*named, *order]))[:MOST_RIVALS]
        for arm in rivals:
            self._ready(ladder, [arm], value)
        live = self.state.live(workload.id, rivals)
        if len(live) < 2 or Arm(implementation=self.plan.baseline) not in live:  # noqa: PLR2004 - one has no rival
            return False
        while len(live) > 1 and self.state.num_visits[workload.id] < FEWEST_PROCESSES:
            self.show("search", f"{len(live)} rivals at {ladder.axis} {value}")
            self.session.start_worker()
            self.visit(workload, live)
            live = self.state.live(workload.id, live)
        return len(live) > 1

    def _workload(self, ladder: Ladder, value: int) -> Workload:
        return next(each for each in self.plan.workloads if each.id == ladder.by_value[value])
