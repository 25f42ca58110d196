"""Functions against a baseline, here and now in this process: the engine of a run without its files and workers.

What the doctor, the acceptance tests and a test suite of yours use to compare a few callables.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from attnbench.devices.clock import Clock, CpuClock, VirtualClock
from attnbench.statistics.evidence import e_values
from attnbench.statistics.interference import CANARY, Gauge, canary
from attnbench.statistics.intervals import FEWEST_CLUSTERS, Block, Estimate, paired_ratio, pairs, t_quantile
from attnbench.statistics.verdicts import Judgement, decide, detectable, is_settled, judge
from attnbench.storage.events import twin
from attnbench.storage.records import SMALLEST_EFFECT, Comparison, Sample, Verdict
from attnbench.timing import blocks as measure
from attnbench.timing.schedule import GROWTH, visit_seed
from attnbench.workloads.workload import Workload

HERE = "here"
"""Stands where a run has its workloads' names."""


@dataclass(kw_only=True)
class Duel:
    """What came of it so far."""

    baseline: str
    arms: tuple[measure.Arm, ...]  # the baseline's twin and the canary too
    clock: Clock
    conditions: measure.Conditions
    smallest_effect: float
    num_blocks: int
    seed: int
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by arm
    judgements: dict[str, Judgement] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    settled_s: dict[str, float] = field(default_factory=dict)  # after how many seconds each verdict was settled
    start_s: float  # on the clock
    spent_s: float = 0.0  # since then
    num_visits: int = 0
    gauge: Gauge = field(default_factory=Gauge)

    @property
    def rivals(self) -> list[str]:
        """Who is compared with the baseline."""
        return [arm.name for arm in self.arms if arm.name not in {self.baseline, twin(self.baseline), CANARY}]

    @property
    def void(self) -> set[Block]:
        """The blocks that were disturbed."""
        return self.gauge.void.get(HERE, set())

    @property
    def floor(self) -> Estimate | None:
        """The ratio of the baseline to itself."""
        return paired_ratio(pairs(self.samples[twin(self.baseline)], self.samples[self.baseline], self.void))

    def visit(self) -> None:
        """Take one visit more."""
        seed = visit_seed(self.seed, HERE, self.num_visits)
        at = measure.Visit(epoch=0, number=self.num_visits, num_blocks=self.num_blocks, seed=seed)
        taken = measure.visit(self.arms, self.clock, at, self.conditions)
        for name, samples in taken.items():
            self.samples.setdefault(name, []).extend(samples)
        self.gauge.hear(HERE, taken[CANARY])
        self.num_visits += 1
        self.spent_s = self.clock.now() - self.start_s

    def judge(self) -> None:
        """Say of all rivals what their pairs say now."""
        twins, floor = self.samples[twin(self.baseline)], self.floor
        for name in self.rivals:
            compared = pairs(self.samples[name], self.samples[self.baseline], self.void, twins)
            found = judge(compared, floor, self.smallest_effect)
            if found is not None:
                self.judgements[name] = found
        told = decide(list(self.judgements.values()))
        self.verdicts = dict(zip(self.judgements, told, strict=True))
        for name, judged in self.judgements.items():
            if is_settled(judged, self.verdicts[name]):
                self.settled_s.setdefault(name, self.spent_s)


def comparison(found: Duel, name: str, workload: Workload) -> Comparison:
    """What a duel says of one of its arms, as a run would say it."""
    judged, verdict = found.judgements[name], found.verdicts[name]
    return Comparison(
        workload=workload,
        implementation=name,
        baseline=found.baseline,
        metric="latency",
        ratio=judged.ratio.point,
        low=judged.ratio.low,
        high=judged.ratio.high,
        minimum_detectable_effect=detectable(judged),
        verdict=verdict,
        sameness=judged.sameness,
        e_same=judged.e_same,
        e_apart=judged.e_apart,
        more_s=None,
    )


def duel(  # noqa: PLR0913 - all but the first two have defaults that serve
    calls: Mapping[str, Callable[[], object]],
    baseline: str,
    *,
    budget_s: float = 10.0,
    stops: bool = True,
    smallest_effect: float = SMALLEST_EFFECT,
    clock: Clock | None = None,
    num_blocks: int = 4,
    seed: int = 0,
    gauge_work: Callable[[], object] | None = None,
) -> Duel:
    """Time each of `calls` against `calls[baseline]` until every verdict is settled or `budget_s` is spent.

    Without `stops`, the budget is spent to its end, whatever is found, and judged then alone. `gauge_work` is the
    canary's, by default a small matrix product and a copy. A difference below `smallest_effect` is none that matters.

    Raises:
        ValueError: the baseline is not among the calls.
    """
    found = begin(
        calls,
        baseline,
        smallest_effect=smallest_effect,
        clock=clock or CpuClock(),
        num_blocks=num_blocks,
        seed=seed,
        gauge_work=gauge_work,
    )
    due = FEWEST_CLUSTERS
    while found.spent_s < budget_s or found.num_visits < FEWEST_CLUSTERS:
        found.visit()
        if stops and found.num_visits >= due:
            due = max(due + 1, int(due * GROWTH))
            found.judge()
            if len(found.settled_s) == len(found.rivals):
                return found
    found.judge()
    return found


def prepare() -> None:
    """Load what the first judgement would, amid the samples: libraries that take their time, and whose threads spin."""
    if "scipy.special" in sys.modules and "pandas" in sys.modules:
        return
    t_quantile(0.5, 1.0)
    e_values(np.zeros(1))
    measure.settle(limit_s=0.3)


def begin(  # noqa: PLR0913 - as above
    calls: Mapping[str, Callable[[], object]],
    baseline: str,
    *,
    smallest_effect: float = SMALLEST_EFFECT,
    clock: Clock,
    num_blocks: int = 4,
    seed: int = 0,
    gauge_work: Callable[[], object] | None = None,
) -> Duel:
    """The same before its first visit, for whoever has several to go through by turns.

    Raises:
        ValueError: the baseline is not among the calls.
    """
    if baseline not in calls:
        raise ValueError(f"the baseline {baseline} is not among the calls: {', '.join(calls)}")
    prepare()
    arms = [measure.Arm(name=name, call=call) for name, call in calls.items()]
    arms.append(measure.Arm(name=twin(baseline), call=calls[baseline]))
    arms.append(measure.canary_arm(CANARY, gauge_work or canary()))
    return Duel(
        baseline=baseline,
        arms=tuple(arms),
        clock=clock,
        conditions=measure.WARM if isinstance(clock, VirtualClock) else measure.here(),
        smallest_effect=smallest_effect,
        num_blocks=num_blocks,
        seed=seed,
        start_s=clock.now(),
    )
