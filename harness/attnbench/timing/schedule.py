"""How far a run is, which workload it visits next and with which arms: time goes where a verdict is open and in reach.

Every arm gets the same few visits first, in rounds over all workloads. Then the next visit goes to an open comparison
with a probability that grows with the evidence it promises per second, so that visits spread over the session; a tenth
is shared evenly among all open ones, since a promise may be wrong. What is decided gets no more visits. Knows nothing
of torch.

Source of the idea: best-arm identification by racing, Maron and Moore, 1994, https://papers.nips.cc/paper/841.
"""

import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from attnbench.statistics.evidence import e_values
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import FEWEST_CLUSTERS, paired_ratio, pairs_with_baseline, t_quantile
from attnbench.statistics.verdicts import ALONE, CELLS, Effect, judge, needed, paired_effect, visits_to_go, within
from attnbench.storage import events
from attnbench.storage.events import Plan
from attnbench.storage.records import PROBE, Arm, Key, Place, Sample, Status, Verdict
from attnbench.timing.blocks import settle
from attnbench.workloads.sweep import SMALLEST_EFFECT

MIN_ROUNDS = 3
"""Fewer visits than this give no interval: for these the budget may be exceeded."""
UNIFORM_SHARE = 0.1
CAUTION = 0.8
"""A comparison is closed when its verdict would hold with this share of the false verdicts that are allowed: visits
that it shares with others afterwards may weaken it. What is equivalent within a noise floor is closed, too, unless the
smallest effect that matters is less than usual: then the floor is to fall."""
GROWTH = 1.1
"""A workload is judged again when it has this many times the visits that it had."""


def rounds(workloads: Sequence[str], seed: int, number: int = MIN_ROUNDS) -> Iterator[list[str]]:
    """The first rounds over the workloads, each in another order."""
    draws = random.Random(seed)
    for _ in range(number):
        yield draws.sample(workloads, len(workloads))


def visit_seed(seed: int, workload: str, number: int) -> int:
    """The seed of a visit's orders, which follows from run seed, workload and visit, the same on every machine."""
    return random.Random(f"{seed}/{workload}/{number}").getrandbits(53)


def load_libraries() -> None:
    """Import what judging needs now, and not amid the samples: it takes time, and starts threads that spin."""
    if "scipy.special" in sys.modules and "pandas" in sys.modules:
        return
    t_quantile(0.5, 1.0)
    e_values(np.zeros(1))
    settle(limit_s=0.3)


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
                self.gauge.add(event.workload, event.samples(PROBE))
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


@dataclass
class Race:
    """The comparisons of a run: their judgements so far, and which are closed."""

    plan: Plan
    judged: dict[Key, Effect] = field(default_factory=dict)
    closed: dict[Key, Verdict] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)

    def refresh(self, state: State, live: Mapping[str, Sequence[Arm]]) -> None:
        """Judge again what has grown, and close what is decided."""
        grown = [workload for workload in live if state.num_visits[workload] >= self._due.get(workload, 0)]
        for workload in grown:
            self._due[workload] = max(state.num_visits[workload] * GROWTH, state.num_visits[workload] + 1)
            self._judge(workload, state, live[workload])
        if not grown:
            return
        alive = [key for key in self.judged if key[1] in live.get(key[0], ())]
        usual = ALONE if self.plan.sides is None else CELLS
        cautious = within(usual, CAUTION * self.plan.false_share)
        is_fine = self.plan.smallest_effect < SMALLEST_EFFECT  # who looks for less than is usual
        for key, judgement in zip(alive, judge([self.judged[key] for key in alive], cautious), strict=True):
            if judgement.is_settled or (judgement.verdict is Verdict.equivalent and not is_fine):
                self.closed[key] = judgement.verdict

    def _judge(self, workload: str, state: State, arms: Sequence[Arm]) -> None:
        taken, discarded = state.samples.get(workload, {}), state.gauge.discarded.get(workload, set())
        for arm in arms:
            reference = self.plan.reference(arm)
            if arm == reference or (workload, arm) in self.closed:
                continue
            own, baseline = taken.get(arm, []), taken.get(reference, [])
            control = taken.get(reference.as_control(), [])
            by_epoch = self.plan.counts_processes(arm)
            own_control = taken.get(arm.as_control(), []) if by_epoch else None
            compared, controls = pairs_with_baseline(own, baseline, control, discarded, own_control)
            blocks = compared if self.plan.is_alone(arm) else None
            compared, floor = compared.by_epoch() if by_epoch else compared, paired_ratio(controls)
            effect = paired_effect(compared, floor, self.plan.smallest_effect, within=blocks)
            if effect is not None:
                self.judged[workload, arm] = effect

    def next(self, state: State, live: Mapping[str, Sequence[Arm]]) -> tuple[str, list[Arm]] | None:
        """The workload to visit, and the arms to compare with its baseline; None when every comparison is closed."""
        self.refresh(state, live)
        verdicts = [self.closed.get(key, Verdict.undecided) for key in self.judged]
        limits = needed(verdicts, self.plan.false_share)
        opened: dict[str, list[tuple[Arm, float, float]]] = {}  # about how many visits decide it, and what one costs
        for workload, arms in self.still_open(live).items():
            for arm in arms:
                judged = self.judged.get((workload, arm))  # None: all blocks discarded
                visits = FEWEST_CLUSTERS if judged is None else visits_to_go(judged, limits)
                cost_s = _visit_s(state.samples[workload][arm])
                opened.setdefault(workload, []).append((arm, visits, cost_s))
        if not opened:
            return None
        draws = random.Random(f"{self.plan.seed}/{sum(state.num_visits.values())}")
        if draws.random() < UNIFORM_SHARE:
            workload = draws.choice(list(opened))
            return workload, [arm for arm, _, _ in opened[workload]]
        baseline = Arm(implementation=self.plan.baseline)
        chosen: dict[str, list[Arm]] = {}
        weights: list[float] = []
        for workload, rows in opened.items():  # most promising first, as long as each raises the promise per second
            total_s = 2 * _visit_s(state.samples[workload][baseline])  # with its A/A control
            evidence, chosen[workload] = 0.0, []
            for arm, visits, cost_s in sorted(rows, key=lambda row: row[1] * row[2]):
                if chosen[workload] and (evidence + 1 / visits) / (total_s + cost_s) < evidence / total_s:
                    break
                evidence, total_s = evidence + 1 / visits, total_s + cost_s
                chosen[workload].append(arm)
            weights.append(evidence / total_s)
        workload = draws.choices(list(chosen), weights)[0] if sum(weights) else draws.choice(list(chosen))
        return workload, chosen[workload]

    def still_open(self, live: Mapping[str, Sequence[Arm]]) -> dict[str, list[Arm]]:
        """By workload, which arms have no verdict yet, without their baselines; workloads without any are left out."""
        undecided = {
            workload: [arm for arm in arms if not self.plan.is_reference(arm) and (workload, arm) not in self.closed]
            for workload, arms in live.items()
        }
        return {workload: arms for workload, arms in undecided.items() if arms}


def _visit_s(samples: Sequence[Sample]) -> float:
    """About how many seconds its samples take in a visit; before a short one come an untimed call and bookkeeping."""
    last = samples[-1].visit
    own = takewhile(lambda sample: sample.visit == last, reversed(samples))
    return sum(max(1e-3, sample.value * sample.num_calls) for sample in own)
