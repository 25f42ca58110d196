"""Choose the order of the visits in a session: one loop, and strategies that derive the next visit from the state.

A visit is a few blocks of one workload. A pass is a fresh process that visits each open workload once. A workload is
open while a comparison of two of its arms (implementations) needs more visits. So each process adds one number to every
comparison of the open workloads. Which workloads are open follows from the journal, so that a killed run can continue.
"""

import math
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from attnbench.devices.waiting import wait_for_idle_threads
from attnbench.statistics.choice import standing
from attnbench.statistics.effects import WHOLE, effects, judge_effects, run_numbers
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.verdict import LOOKS, Judgement, half_widths
from attnbench.storage.events import Plan
from attnbench.storage.fold import State
from attnbench.storage.records import Arm, Key

Live = Mapping[str, Sequence[Arm]]  # by workload id: arms that have passed their check
DECIDED = "every comparison is decided, or has had all its processes"
NOTHING = "there is nothing to compare"
SPENT = "the budget is spent"
ANSWERED = "the answer is clear"


def visit_seed(seed: int, workload: str, number: int) -> int:
    """Return the seed for the random orders of a visit, from the run's seed, the workload and the visit's number."""
    return random.Random(f"{seed}/{workload}/{number}").getrandbits(53)


def load_libraries() -> None:
    """Import the libraries for judging before any sampling, because the import takes time and starts busy threads."""
    if not {"scipy.special", "pandas"} <= set(sys.modules):
        half_widths(1.0, 1.0, 0.5)
        wait_for_idle_threads(limit_s=0.3)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The next visit (a few timed blocks): a workload, its arms, and whether a fresh process makes the visit."""

    workload: str
    arms: tuple[Arm, ...]
    is_fresh: bool = False


class Strategy(Protocol):
    """The interface of objects that choose the next visit from the state of the run and the time spent."""

    reason: str  # why it ended

    def next(self, state: State, live: Live, now_s: float) -> Step | None:
        """Return the next visit, with live arms of one workload, after `now_s` seconds of the run; None at the end."""


def run_strategy(
    strategy: Strategy,
    state: State,
    live: Callable[[], Live],
    now_s: Callable[[], float],
    visit: Callable[[Step], object],
) -> str:
    """Make the visits that a strategy chooses, until it ends; return the reason why it ended.

    `visit` makes one visit, a few blocks of one workload, and adds its results to `state`, from which the strategy
    chooses the next. `live` gives the arms that have passed their check, and `now_s` the seconds of the run so far.
    """
    load_libraries()
    while (step := strategy.next(state, live(), now_s())) is not None:
        visit(step)
    return strategy.reason


@dataclass
class Passes(ABC):
    """A strategy that works in passes.

    A pass is a fresh process that times a few blocks (a visit) of each open workload. A workload is open while it needs
    more samples.
    """

    plan: Plan
    reason: str = ""
    gauge: InterferenceGauge = field(default_factory=InterferenceGauge)
    _pass: dict[str, list[Arm]] = field(default_factory=dict)  # arms by workload, for the process's remaining visits

    @abstractmethod
    def open(self, state: State, live: Live, now_s: float = 0.0) -> dict[str, list[Arm]]:
        """Return the arms to visit in the pass that begins now, by workload; if there are none, set `reason`."""

    def is_first(self, state: State, workload: str) -> bool:
        """Return whether a workload has had fewer than `num_rounds` visits, and is thus in its first passes."""
        return state.num_visits[workload] < self.plan.num_rounds

    def next(self, state: State, live: Live, now_s: float = 0.0) -> Step | None:
        """Return a visit of the open workload with the fewest visits, among those that this process has not visited.

        After the last open workload, a fresh process starts. Returns None if none is open, or if the budget is spent.
        """
        is_fresh = not any(live.get(workload) for workload in self._pass)
        if is_fresh:
            self._pass = self.open(state, live, now_s)
        workload = min(
            (workload for workload in self._pass if live.get(workload)),
            key=lambda each: (state.num_visits[each], visit_seed(self.plan.seed, each, state.num_workers)),
            default=None,
        )
        if workload is None:
            return None
        is_needed = self.is_first(state, workload) and not (self.plan.budget_s and state.num_visits[workload])
        if not is_needed and now_s > self.plan.budget_s:
            self.reason = SPENT
            return None
        arms = [arm for arm in self._pass.pop(workload) if arm in live[workload]]
        return Step(workload=workload, arms=tuple(arms), is_fresh=is_fresh)


@dataclass
class Race(Passes):
    """Passes over the workloads whose comparisons need more samples, until none does or the budget is spent."""

    judged: dict[Key, Judgement] = field(default_factory=dict)
    _began_s: float = 0.0
    _num_open: int = 0  # workloads in the pass that began at `_began_s`
    _shortest_s: float = 0.0  # least seconds of a pass per workload; 0: unknown

    def open(self, state: State, live: Live, now_s: float = 0.0) -> dict[str, list[Arm]]:
        """Return the arms that need more visits, by workload, with their references (the arms to compare them with).

        In the first passes, all workloads are open. If two states of the code are compared, all are open while the
        verdict on all cells together is undecided. No workload is open if there is nothing to compare, or if the rest
        of the budget is too short to judge a comparison again.
        """
        pairs = {workload: self._references(arms) for workload, arms in live.items()}
        numbers = run_numbers(state.samples, pairs, self.gauge.follow(state.probes))
        self.judged = judge_effects(self.plan, effects(self.plan, numbers))
        is_all_open = WHOLE in self.judged and self.judged[WHOLE].needs_more
        opened = {}
        for workload, references in pairs.items():
            known = {arm: self.judged.get((workload, arm)) for arm, other in references.items() if arm != other}
            # None: every block was discarded
            wanted = [arm for arm, each in known.items() if is_all_open or each is None or each.needs_more]
            if self.is_first(state, workload) and live[workload]:
                opened[workload] = [*live[workload]]
            elif wanted:
                opened[workload] = [*dict.fromkeys([*map(references.__getitem__, wanted), *wanted])]
        self.reason = "" if opened or not live else DECIDED if self.judged else NOTHING
        if self._num_open:
            self._shortest_s = min(self._shortest_s or math.inf, (now_s - self._began_s) / self._num_open)
        self._began_s, self._num_open = now_s, len(opened)
        pass_s = self._shortest_s * len(opened)
        num_passes = (self.plan.budget_s - now_s) / pass_s if pass_s else math.inf
        if opened and not self.reaches_a_look(state, num_passes):
            self.reason, opened = SPENT, {}
        return opened

    def _references(self, arms: Sequence[Arm]) -> dict[Arm, Arm]:
        """Return, by arm, the arm with which it is compared, if any.

        The first arm replaces a baseline that is wrong or failed.
        """
        if arms and self.plan.sides is None and not any(map(self.plan.is_reference, arms)):
            return dict.fromkeys(arms, arms[0])
        return {arm: reference for arm in arms if (reference := self.plan.reference(arm)) in arms}

    def reaches_a_look(self, state: State, num_passes: float) -> bool:
        """Return whether an undecided comparison can be judged again within `num_passes` more passes.

        A comparison is judged only after the numbers of processes in LOOKS. The result is also True while a workload
        lacks some of its first visits, or if nothing is judged yet.
        """
        going = [workload for workload in state.num_visits if state.live(workload, self.plan.specs)]
        if any(self.is_first(state, workload) for workload in going) or not self.judged:
            return True
        counts = [each.effect.num_measured for each in self.judged.values() if each.needs_more]
        return any(number < look <= number + num_passes for number in counts for look in LOOKS)


@dataclass
class Choice(Passes):
    """Passes over the candidates for the fastest implementation of each workload, until the fastest one is clear."""

    def open(self, state: State, live: Live, now_s: float = 0.0) -> dict[str, list[Arm]]:  # noqa: ARG002 - the signature of Passes
        """Return the arms to visit, by workload: all arms in the first passes.

        After that, these are the leader (the fastest arm), the arms not yet decided against it, and the reference (the
        baseline, or the first arm with samples if the baseline has none).
        """
        opened, discarded = {}, self.gauge.follow(state.probes)
        for workload, arms in live.items():
            taken = state.samples.get(workload, {})
            if self.is_first(state, workload):
                opened[workload] = [*arms]
            elif (stands := standing(self.plan, taken, arms, discarded.get(workload, ()))) and stands.open:
                names = {stands.leader, stands.reference, *stands.open}
                opened[workload] = [arm for arm in arms if arm.implementation in names]
        self.reason = ANSWERED if live and not opened else ""
        return opened
