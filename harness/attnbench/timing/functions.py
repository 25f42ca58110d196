"""Functions against a baseline, here and now in this process: the engine of a run without its files and workers.

What the doctor, the acceptance tests and a test suite of yours use to compare a few callables.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from attnbench.devices import Clock, device
from attnbench.statistics.effects import Effect, paired_effect
from attnbench.statistics.evidence import e_values
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import FEWEST_CLUSTERS, Block, Estimate, paired_ratio, pairs, t_quantile
from attnbench.statistics.verdicts import Judgement, detectable, judge
from attnbench.storage.records import PROBE, SMALLEST_EFFECT, Arm, Comparison, Role, Sample
from attnbench.timing import blocks as measure
from attnbench.timing.schedule import GROWTH, visit_seed
from attnbench.workloads.workload import Workload

HERE = "here"
"""Stands where a run has its workloads' names."""


@dataclass(kw_only=True)
class FunctionComparison:
    """A comparison of functions, as far as it has come."""

    baseline: str
    calls: tuple[measure.TimedCall, ...]  # the A/A control and the interference probe among them
    clock: Clock
    conditions: measure.Conditions
    smallest_effect: float
    num_blocks: int
    seed: int
    samples: dict[Arm, list[Sample]] = field(default_factory=dict)
    judgements: dict[str, Judgement] = field(default_factory=dict)
    settled_s: dict[str, float] = field(default_factory=dict)  # after how many seconds each verdict was settled
    start_s: float  # on the clock
    spent_s: float = 0.0  # since then
    num_visits: int = 0
    gauge: InterferenceGauge = field(default_factory=InterferenceGauge)

    @property
    def rivals(self) -> list[str]:
        """Who is compared with the baseline."""
        measured = [each.arm for each in self.calls if each.arm.role is Role.measured]
        return [arm.implementation for arm in measured if arm.implementation != self.baseline]

    @property
    def reference(self) -> Arm:
        """What the rivals are compared with."""
        return Arm(implementation=self.baseline)

    @property
    def control(self) -> Arm:
        """The baseline's A/A control."""
        return self.reference.as_control()

    @property
    def discarded(self) -> set[Block]:
        """The blocks that were disturbed."""
        return self.gauge.discarded.get(HERE, set())

    @property
    def floor(self) -> Estimate | None:
        """The ratio of the baseline to itself."""
        return paired_ratio(pairs(self.samples[self.control], self.samples[self.reference], self.discarded))

    def visit(self) -> None:
        """Take one visit more."""
        seed = visit_seed(self.seed, HERE, self.num_visits)
        at = measure.Visit(epoch=0, number=self.num_visits, num_blocks=self.num_blocks, seed=seed)
        taken = measure.visit(self.calls, self.clock, at, self.conditions)
        for arm, samples in taken.items():
            self.samples.setdefault(arm, []).extend(samples)
        self.gauge.add(HERE, taken[PROBE])
        self.num_visits += 1
        self.spent_s = self.clock.now() - self.start_s

    def judge(self) -> None:
        """Say of all rivals what their pairs say now."""
        floor, effects = self.floor, dict[str, Effect]()
        for name in self.rivals:
            own = self.samples[Arm(implementation=name)]
            compared = pairs(own, self.samples[self.reference], self.discarded, self.samples[self.control])
            effect = paired_effect(compared, floor, self.smallest_effect)
            if effect is not None:
                effects[name] = effect
        self.judgements = dict(zip(effects, judge(list(effects.values())), strict=True))
        for name, judged in self.judgements.items():
            if judged.is_settled:
                self.settled_s.setdefault(name, self.spent_s)


def comparison(found: FunctionComparison, name: str, workload: Workload) -> Comparison:
    """What a comparison of functions says of one of them, in the form that a run has."""
    judged, effect = found.judgements[name], found.judgements[name].effect
    return Comparison(
        workload=workload,
        implementation=name,
        baseline=found.baseline,
        metric="latency",
        ratio=effect.ratio.point,
        low=effect.ratio.low,
        high=effect.ratio.high,
        minimum_detectable_effect=detectable(effect),
        verdict=judged.verdict,
        sameness=effect.sameness,
        e_same=effect.e_same,
        e_apart=effect.e_apart,
        more_s=None,
    )


def compare_functions(  # noqa: PLR0913 - all but the first two have defaults that serve
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
    conditions: measure.Conditions | None = None,
) -> FunctionComparison:
    """Time each of `calls` against `calls[baseline]` until every verdict is settled or `budget_s` is spent.

    Without `stops`, the budget is spent to its end, whatever is found, and judged then alone. `gauge_work` is the
    interference probe's, by default a small matrix product and a copy. A difference below `smallest_effect` does not
    matter. `clock` and `conditions` are this machine's unless others are given, as where it is simulated.

    Raises:
        ValueError: the baseline is not among the calls.
    """
    found = begin(
        calls,
        baseline,
        smallest_effect=smallest_effect,
        clock=clock or device("cpu").clock,
        num_blocks=num_blocks,
        seed=seed,
        gauge_work=gauge_work,
        conditions=conditions,
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
    conditions: measure.Conditions | None = None,
) -> FunctionComparison:
    """The same before its first visit, for whoever has several to go through by turns.

    Raises:
        ValueError: the baseline is not among the calls.
    """
    if baseline not in calls:
        raise ValueError(f"the baseline {baseline} is not among the calls: {', '.join(calls)}")
    prepare()
    arms = {Arm(implementation=name): call for name, call in calls.items()}
    timed = [measure.TimedCall(arm=arm, call=call) for arm, call in arms.items()]
    timed.append(measure.TimedCall(arm=Arm(implementation=baseline).as_control(), call=calls[baseline]))
    timed.append(measure.probe_call(gauge_work or device("cpu").interference_probe()))
    return FunctionComparison(
        baseline=baseline,
        calls=tuple(timed),
        clock=clock,
        conditions=conditions or measure.here(),
        smallest_effect=smallest_effect,
        num_blocks=num_blocks,
        seed=seed,
        start_s=clock.now(),
    )
