"""How far a run is, what its times show, and what it visits next. Knows nothing of torch.

Time goes in passes. A pass is a fresh process that visits each open workload once, with the arms that are still open;
what is decided gets no more visits. So processes stay balanced over comparisons, and each gives a comparison one
number. What comes next follows from the journal alone, so that a run that was killed goes on where it was.
"""

import math
import random
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import Block, Visit, by_process, effect_of, visit_numbers
from attnbench.statistics.verdict import LOOKS, Effect, Judgement, effect, half_widths, judge
from attnbench.storage import events
from attnbench.storage.events import Plan
from attnbench.storage.records import PROBE, Arm, Key, Place, Sample, Status, Verdict
from attnbench.timing.blocks import settle

WHOLE: Key = ("*", Arm())
"""In place of a cell: all cells of a session with two sides together."""
Taken = Mapping[Arm, Sequence[Sample]]
"""The samples of one workload, by arm, controls among them."""
Live = Mapping[str, Sequence[Arm]]
"""By workload, the arms that have passed so far."""
DECIDED = "every comparison is decided"
NOTHING = "there is nothing to compare"
SPENT = "the budget is spent"


def visit_seed(seed: int, workload: str, number: int) -> int:
    """The seed of a visit's orders, which follows from run seed, workload and visit, the same on every machine."""
    return random.Random(f"{seed}/{workload}/{number}").getrandbits(53)


def load_libraries() -> None:
    """Import what judging needs now, and not amid the samples: it takes time, and starts threads that spin."""
    if "scipy.special" in sys.modules and "pandas" in sys.modules:
        return
    half_widths(1.0, 1.0, 0.5)
    settle(limit_s=0.3)


def numbers(taken: Taken, arm: Arm, reference: Arm, discarded: Collection[Block] = ()) -> dict[Visit, float]:
    """One log ratio of an arm to another for each visit; an A/A control counts as the same code."""
    arms, references = (
        [own for each in (one, one.as_control()) if len(own := taken.get(each, ()))] for one in (arm, reference)
    )
    return visit_numbers(arms, references, discarded)


def control_numbers(taken: Taken, reference: Arm, discarded: Collection[Block] = ()) -> dict[Visit, float]:
    """The log ratio of an arm's A/A control to itself for each visit: what noise alone shows."""
    return visit_numbers([taken.get(reference.as_control(), ())], [taken.get(reference, ())], discarded)


Numbers = dict[Key, dict[Visit, float]]
"""The log ratios of comparisons, one for each visit."""


def cell_numbers(plan: Plan, workload: str, taken: Taken, discarded: Collection[Block], arms: Iterable[Arm]) -> Numbers:
    """The numbers of each of the arms of a workload that has a block in common with its reference."""
    found = {
        (workload, arm): numbers(taken, arm, plan.reference(arm), discarded)
        for arm in arms
        if not plan.is_reference(arm)
    }
    return {key: own for key, own in found.items() if own}


def effects(plan: Plan, found: Numbers) -> dict[Key, Effect]:
    """The effect of each comparison of a run, and of all together where it has two sides."""
    known = {key: effect_of(own) for key, own in found.items()}
    if plan.sides is not None and (whole := over_cells([*map(by_process, found.values())])):
        known[WHOLE] = effect([*whole.values()])
    return known


def over_cells(cells: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean of the cells' log ratios for each process that has visited all of them: cells share its bias."""
    shared = set.intersection(*(set(own) for own in cells)) if cells else set()
    return {epoch: sum(own[epoch] for own in cells) / len(cells) for epoch in sorted(shared)}


def judged(plan: Plan, known: Mapping[Key, Effect]) -> dict[Key, Judgement]:
    """The verdicts on the effects of a run, judged together; between two sides no difference is expected."""
    return judge(known, plan.smallest_effect, plan.false_share, expects_differences=plan.sides is None)


@dataclass
class State:
    """How far a run is: what follows from its events so far."""

    status: dict[Key, Status] = field(default_factory=dict)
    profiled: set[Key] = field(default_factory=set)
    observed: set[tuple[Key, str]] = field(default_factory=set)
    ceilings: set[Place] = field(default_factory=set)
    num_visits: Counter[str] = field(default_factory=Counter)
    num_workers: int = 0
    began: events.WorkerStarted | None = None  # the first of them
    spent_s: float = 0.0  # of the run: until its last visit, and inside checks and ceilings after it
    samples: dict[str, dict[Arm, list[Sample]]] = field(default_factory=dict)  # by workload and arm
    gauge: InterferenceGauge = field(default_factory=InterferenceGauge)
    counts: Counter[str] = field(default_factory=Counter)  # cells by status, kept up: there may be 100,000 of them

    def conclude(self, cell: Key, status: Status) -> None:
        """Give a cell a status, in place of an earlier one."""
        if cell in self.status:
            self.counts[self.status[cell]] -= 1
        self.status[cell] = status
        self.counts[status] += 1

    def apply(self, event: events.Event) -> None:
        """Add one event."""
        match event:
            case events.CellChecked():
                self.conclude(event.key, event.status)
                self.spent_s += event.check_s
            case events.CellFailed():
                self.conclude(event.key, event.status)
            case events.CellProfiled():
                self.profiled.add(event.key)
                if event.operators.fallback:
                    self.conclude(event.key, Status.fallback)
            case events.CellMeasured():
                self.observed.add((event.key, event.measurement.metric))
            case events.CeilingsMeasured():
                self.ceilings.add(event.ceilings.key)
                self.spent_s += event.spent_s
            case events.VisitFinished():
                self.num_visits[event.workload] = event.visit + 1
                self.num_workers = max(self.num_workers, event.epoch + 1)  # where its start was lost
                self.spent_s = max(self.spent_s + event.called_s, event.elapsed_s)
                arms = self.samples.setdefault(event.workload, {})
                for taken in event.arms:
                    arms.setdefault(taken.arm, []).extend(taken.samples)
                self.gauge.add(event.workload, event.samples(PROBE), event.probe)
            case events.WorkerStarted():
                self.num_workers += 1
                self.began = self.began or event
            case events.RunStarted() | events.RunFinished() | events.BaselineAccepted() | events.LinesLost():
                pass
            case events.StateChanged() | events.JournalRestored():
                pass

    def live(self, workload: str, arms: Iterable[Arm]) -> list[Arm]:
        """Those of the arms that have passed on that workload so far."""
        return [arm for arm in arms if self.status.get((workload, arm)) is Status.ok]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The next visit: the arms of a workload, and whether a fresh process takes it."""

    workload: str
    arms: tuple[Arm, ...]
    is_fresh: bool = False
    words: str = ""  # for whoever watches


class Strategy(Protocol):
    """Says what is visited next, from the state alone."""

    reason: str  # why it came to its end

    def next(self, state: State, live: Live, now_s: float) -> Step | None:
        """The next visit, among the live arms of each workload; None at the end."""


def follow(
    strategy: Strategy,
    state: State,
    live: Callable[[], Live],
    now_s: Callable[[], float],
    visit: Callable[[Step], object],
) -> str:
    """Visit what a strategy says, which sees each visit in the state; return why it came to its end."""
    load_libraries()
    while (step := strategy.next(state, live(), now_s())) is not None:
        visit(step)
    return strategy.reason


@dataclass
class Passes(ABC):
    """A strategy whose every pass is a fresh process, which visits each open workload once."""

    plan: Plan
    reason: str = ""
    _pass: dict[str, list[Arm]] = field(default_factory=dict)  # what the process has still to visit

    @abstractmethod
    def open(self, state: State, live: Live) -> dict[str, list[Arm]]:
        """By workload, the arms that need more visits."""

    @abstractmethod
    def fits(self, state: State, workload: str, now_s: float, *, is_fresh: bool) -> bool:
        """Whether the budget allows for this visit; a fresh one begins a pass."""

    @abstractmethod
    def ended(self, live: Live) -> str:
        """Why it came to its end where nothing is open."""

    def next(self, state: State, live: Live, now_s: float = 0.0) -> Step | None:
        """The least-visited open workload that this process has not visited; after the last a fresh process."""
        is_fresh = not any(live.get(workload) for workload in self._pass)
        if is_fresh:
            self._pass = self.open(state, live)
        workload = min(
            (workload for workload in self._pass if live.get(workload)),
            key=lambda each: (state.num_visits[each], visit_seed(self.plan.seed, each, state.num_workers)),
            default=None,
        )
        if workload is None:
            self.reason = self.ended(live)
            return None
        if not self.fits(state, workload, now_s, is_fresh=is_fresh):
            self.reason = SPENT
            return None
        arms = [arm for arm in self._pass.pop(workload) if arm in live[workload]]
        words = f"{workload}, pass {state.num_visits[workload] + 1}"
        return Step(workload=workload, arms=tuple(arms), is_fresh=is_fresh, words=words)


@dataclass
class Race(Passes):
    """Passes over the open comparisons of a run, until every one is decided."""

    judged: dict[Key, Judgement] = field(default_factory=dict)
    _numbers: dict[str, tuple[object, Numbers]] = field(default_factory=dict)  # by workload, with what they are of
    _began_s: float = 0.0
    _shortest_s: float = 0.0  # of a pass

    @property
    def num_open(self) -> int:
        """Comparisons without a verdict."""
        return sum(each.verdict is Verdict.undecided for each in self.judged.values())

    def fits(self, state: State, workload: str, now_s: float, *, is_fresh: bool) -> bool:
        """Whether the first passes last, or the budget does, and a pass that it allows for can decide anything."""
        if is_fresh:
            if self._began_s:
                self._shortest_s = min(self._shortest_s or math.inf, now_s - self._began_s)
            self._began_s = now_s
            left_s = self.plan.budget_s - now_s
            if not self.reaches_a_look(state, left_s / self._shortest_s if self._shortest_s else math.inf):
                return False
        return self.is_first(state, workload) or now_s <= self.plan.budget_s

    def ended(self, live: Live) -> str:
        """Every comparison is decided, or there was none."""
        return DECIDED if self.judged else NOTHING if live else ""

    def open(self, state: State, live: Live) -> dict[str, list[Arm]]:
        """By workload, the arms that need more visits, with their references.

        Everything is open in the first passes, and as long as a session with two sides has no verdict on the whole.
        Where nothing was ever compared, nothing is open after that: more visits would end as these did.
        """
        comparable = {
            workload: [arm for arm in arms if self.plan.reference(arm) in arms] for workload, arms in live.items()
        }
        self.judged = judged(self.plan, effects(self.plan, self._renewed(state, comparable)))
        whole = self.judged.get(WHOLE)
        is_all_open = whole is not None and _needs_more(whole)
        found = {}
        for workload, arms in comparable.items():
            is_first = self.is_first(state, workload)
            wanted = [
                arm
                for arm in arms
                if not self.plan.is_reference(arm) and (is_all_open or _needs_more(self.judged.get((workload, arm))))
            ]
            if is_first and live[workload]:
                found[workload] = [*live[workload]]
            elif wanted:
                found[workload] = [*dict.fromkeys([*map(self.plan.reference, wanted), *wanted])]
        return found

    def _renewed(self, state: State, comparable: Mapping[str, Sequence[Arm]]) -> Numbers:
        """The numbers of all comparisons; only those of workloads that were visited since are computed again."""
        for workload, arms in comparable.items():
            mark = state.num_visits[workload], tuple(arms)
            if self._numbers.get(workload, (None, {}))[0] != mark:
                discarded = state.gauge.discarded.get(workload, set())
                taken = state.samples.get(workload, {})
                self._numbers[workload] = mark, cell_numbers(self.plan, workload, taken, discarded, arms)
        return {key: own for workload in comparable for key, own in self._numbers[workload][1].items()}

    def is_first(self, state: State, workload: str) -> bool:
        """Whether a workload has still visits to get that every cell gets, decided or not."""
        return state.num_visits[workload] < self.plan.num_rounds

    def reaches_a_look(self, state: State, num_passes: float) -> bool:
        """Whether so many more passes bring an open comparison to its next look, or a workload its first passes."""
        if any(number < self.plan.num_rounds for number in state.num_visits.values()) or not self.judged:
            return True
        return any(
            _needs_more(each) and each.effect.num_measured + num_passes >= _next_look(each.effect.num_measured)
            for each in self.judged.values()
        )


def _needs_more(judgement: Judgement | None) -> bool:
    return judgement is None or judgement.needs_more  # None: every block was discarded


def _next_look(number: int) -> int:
    return next((look for look in LOOKS if look > number), LOOKS[-1])
