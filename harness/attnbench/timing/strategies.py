"""Strategies that look for the fastest: choose among all, and search where two change places along an axis.

Like the race of a run (schedule.py) they are functions of the folded state, so that a search that was killed goes on
where it was. Choosing visits what may still be the fastest. Searching halves the way between two values of an axis
until it is known between which of them two change places (statistics/crossover.py).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from attnbench.statistics.choice import Standing, standing
from attnbench.statistics.crossover import Point, following, point
from attnbench.statistics.intervals import Block, by_process
from attnbench.statistics.verdict import FEWEST_PROCESSES, LOOKS
from attnbench.storage.events import Ladder, Plan
from attnbench.storage.records import Arm
from attnbench.timing.schedule import SPENT, Live, Passes, State, Step, Taken, numbers
from attnbench.workloads.workload import Workload

CHOOSING_SHARE = 0.75
"""The share of the budget that may go to choosing; the rest is for where the choice changes."""
MOST_PROCESSES, POINT_S = LOOKS[2], 6.0
"""At one value of a search: no more processes, and no more seconds once there are enough to decide anything."""
CHOOSING_PROCESSES = 2 * FEWEST_PROCESSES
"""Of each workload that was asked for: half of them choose, and the others judge."""
CALLS_AT_A_VALUE = 60
"""A value is sampled only if this many calls fit into the time that remains, checks included."""
MOST_RIVALS = 4
"""Rivals at other values: the fastest where it was asked, and those that are predicted to be fastest there."""
ANSWERED = "the answer is clear"
SEARCHED = "every search came to its end"
Both = tuple[Arm, Arm]
Steps = Iterator[Step]


def standing_of(
    plan: Plan,
    taken: Taken,
    arms: Iterable[Arm],
    discarded: Collection[Block] = (),
    candidates: Collection[str] | None = None,
) -> Standing | None:
    """The fastest of a workload, and the verdict on each other one; with `candidates`, only they can lead."""
    return standing(
        {arm.implementation: taken.get(arm, ()) for arm in arms},
        plan.baseline,
        control=taken.get(Arm(implementation=plan.baseline).as_control(), ()),
        discarded=discarded,
        smallest=plan.smallest_effect,
        error=plan.false_share,
        candidates=candidates,
    )


def point_of(plan: Plan, taken: Taken, both: Both, discarded: Collection[Block] = ()) -> Point | None:
    """What is known of two implementations at one value of a search; None where no block has both."""
    found = by_process(numbers(taken, *both, discarded))
    return point([*found.values()], plan.num_searches) if found else None


def _standing(plan: Plan, state: State, workload: str) -> Standing | None:
    taken, discarded = state.samples.get(workload, {}), state.gauge.discarded.get(workload, set())
    return standing_of(plan, taken, state.live(workload, plan.specs), discarded)


@dataclass
class Choice(Passes):
    """Passes over whatever may be the fastest of each workload that was asked for, until that is clear."""

    def open(self, state: State, live: Live) -> dict[str, list[Arm]]:
        """All at first, then the leader, what is open, and the baseline."""
        found = {}
        for workload, arms in live.items():
            if state.num_visits[workload] < CHOOSING_PROCESSES:
                found[workload] = [*arms]
                continue
            stands = _standing(self.plan, state, workload)
            if stands is not None and stands.open:
                names = {stands.leader, self.plan.baseline, *stands.open}
                found[workload] = [arm for arm in arms if arm.implementation in names]
        return found

    def fits(self, state: State, workload: str, now_s: float, *, is_fresh: bool) -> bool:
        """Until each workload has its first processes, and then within the budget's share."""
        is_first = state.num_visits[workload] < CHOOSING_PROCESSES
        return not is_fresh or is_first or now_s <= CHOOSING_SHARE * self.plan.budget_s

    def ended(self, live: Live) -> str:
        """Nothing is open."""
        return ANSWERED if live else ""


class Desk(Protocol):
    """What a search asks for between visits."""

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken so far."""

    def check(self, workload: Workload, arm: Arm, call_limit_s: float) -> None:
        """Give the cell a status; a call that is predicted to last longer than the limit is not tried."""

    def predict(self, workload: Workload, call_limit_s: float) -> Mapping[Arm, float]:
        """The predicted seconds of a call of each arm that can be called, 0 where it is too short to predict."""


@dataclass
class Search:
    """Finds between which values of each ladder two implementations change places."""

    plan: Plan
    desk: Desk
    reason: str = ""
    until_s: float = 0.0
    _steps: Steps | None = None
    _workloads: dict[str, Workload] = field(default_factory=dict)

    def next(self, state: State, live: Live, now_s: float = 0.0) -> Step | None:  # noqa: ARG002 - as of a Strategy
        """The next visit, each in a fresh process."""
        if self._steps is None:
            self._workloads = {each.id: each for each in self.plan.workloads}
            self._steps = self._all(state)
        step = next(self._steps, None)
        if step is None:
            self.reason = SPENT if now_s >= self.plan.budget_s else SEARCHED
        return step

    def _all(self, state: State) -> Steps:
        """Every ladder, and every pair of one, with an equal share of the time that remains."""
        end_s, ladders = self.plan.budget_s, self.plan.ladders
        for number, ladder in enumerate(ladders):
            ladder_end_s = self._share(end_s, len(ladders) - number)
            if not ladder.pairs:
                yield from self._changes(state, ladder)
            for place, (one, other) in enumerate(ladder.pairs):
                self._share(ladder_end_s, len(ladder.pairs) - place)
                both = Arm(implementation=one), Arm(implementation=other)
                yield from self._search(state, ladder, both, ladder.values)

    def _share(self, end_s: float, number: int) -> float:
        """Give what comes next an equal share of the time until then; returns when that ends."""
        now_s = self.desk.elapsed_s
        self.until_s = now_s + (end_s - now_s) / number
        return self.until_s

    def _search(self, state: State, ladder: Ladder, both: Both, values: Sequence[int]) -> Steps:
        """Halve the way until nothing more can be learned, or the time is over."""
        allowed = list(values)
        while len(allowed) > 1 and self.desk.elapsed_s < self.until_s:
            value = following(self.points(state, ladder, both, allowed), allowed)
            if value is None:
                return
            yield from self._sample(state, ladder, both, value)
            if len(state.live(ladder.by_value[value], both)) < len(both):
                # what is too large for the time that remains, or not supported, ends the ladder there
                allowed = [each for each in allowed if (each < value if value > allowed[0] else each > value)]

    def _sample(self, state: State, ladder: Ladder, both: Both, value: int) -> Steps:
        """Sample a value until it is known which is faster there, if it can be sampled at all."""
        workload = ladder.by_value[value]
        self._check(state, workload, both)
        start_s = self.desk.elapsed_s
        while len(state.live(workload, both)) == len(both):
            known = self.point(state, workload, both)
            now_s = self.desk.elapsed_s
            if known is not None and (known.sign or known.num_processes >= MOST_PROCESSES) and now_s > start_s:
                return
            is_enough = known is not None and known.num_processes >= FEWEST_PROCESSES
            if is_enough and (now_s > start_s + POINT_S or now_s > self.until_s):
                return
            if now_s > self.until_s + POINT_S:  # interference may discard every block
                return
            words = f"{both[0]} and {both[1]} at {ladder.axis} {value}"
            yield Step(workload=workload, arms=both, is_fresh=True, words=words)

    def _check(self, state: State, workload: str, arms: Sequence[Arm]) -> None:
        """Give each cell a status that has none."""
        for arm in arms:
            if (workload, arm) not in state.status:
                left_s = max(0.0, self.until_s - self.desk.elapsed_s)
                limit_s = min(self.plan.call_limit_s, left_s / CALLS_AT_A_VALUE)
                self.desk.check(self._workloads[workload], arm, limit_s)

    def point(self, state: State, workload: str, both: Both) -> Point | None:
        """What is known at a workload; None where no block has both."""
        discarded = state.gauge.discarded.get(workload, set())
        return point_of(self.plan, state.samples.get(workload, {}), both, discarded)

    def points(self, state: State, ladder: Ladder, both: Both, values: Sequence[int]) -> dict[int, Point]:
        """What is known at those values where both were sampled in common blocks."""
        found = {value: self.point(state, ladder.by_value[value], both) for value in values}
        return {value: each for value, each in found.items() if each is not None}

    def _changes(self, state: State, ladder: Ladder) -> Steps:
        """Find whether another one is the fastest towards the ends of the ladder, and from where on."""
        stands = _standing(self.plan, state, ladder.base)
        if stands is None:
            return
        start, end_s = ladder.workloads.index(ladder.base), self.until_s
        ways = [each for each in (ladder.values[: start + 1], ladder.values[start:][::-1]) if len(each) > 1]
        for number, way in enumerate(ways):  # from an end to where it was asked
            self._share(end_s, len(ways) - number)
            place = 0
            while place < len(way) - 1:
                yield from self._compare(state, ladder, stands, way[place])
                if self._is_compared(state, ladder.by_value[way[place]]):
                    break
                place = (place + len(way)) // 2
            there = _standing(self.plan, state, ladder.by_value[way[place]]) if place < len(way) - 1 else None
            if there is not None and there.leader != stands.leader:
                both = Arm(implementation=stands.leader), Arm(implementation=there.leader)
                yield from self._search(state, ladder, both, sorted(way[place:]))

    def _compare(self, state: State, ladder: Ladder, stands: Standing, value: int) -> Steps:
        """Visit the leader and its rivals at that value a few times.

        Of rivals whose calls are too short there to predict, those come first that are fast at the base.
        """
        left_s = self.until_s - self.desk.elapsed_s
        if left_s <= 0:
            return
        workload = ladder.by_value[value]
        named = [Arm(implementation=name) for name in dict.fromkeys([stands.leader, self.plan.baseline])]
        seconds = self.desk.predict(self._workloads[workload], left_s / CALLS_AT_A_VALUE)
        places = {name: place for place, name in enumerate(stands.others)}
        order = sorted(seconds, key=lambda arm: (seconds[arm], places.get(arm.implementation, len(places))))
        rivals = list(dict.fromkeys([*named, *order]))[:MOST_RIVALS]
        for arm in rivals:
            self._check(state, workload, [arm])
        while len(live := state.live(workload, rivals)) > 1 and Arm(implementation=self.plan.baseline) in live:
            if state.num_visits[workload] >= FEWEST_PROCESSES:
                return
            words = f"{len(live)} rivals at {ladder.axis} {value}"
            yield Step(workload=workload, arms=tuple(live), is_fresh=True, words=words)

    def _is_compared(self, state: State, workload: str) -> bool:
        """Whether the leader and its rivals were visited there."""
        live = state.live(workload, self.plan.specs)
        return state.num_visits[workload] >= FEWEST_PROCESSES and len(live) > 1
