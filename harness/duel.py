"""Functions against a baseline, here and now in this process: the engine of a run without its files and workers.

What the doctor, the acceptance tests and a test suite of yours use to compare a few callables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from harness import measure
from harness.clock import Clock, CpuClock
from harness.events import twin
from harness.records import Comparison, Sample, Verdict, Workload
from harness.schedule import GROWTH, visit_seed
from harness.statistics.interference import CANARY, Gauge, canary
from harness.statistics.stats import FEWEST_CLUSTERS, Block, Estimate, paired_ratio, pairs
from harness.statistics.verdict import SMALLEST_EFFECT, Judgement, decide, detectable, judge, margin

HERE = "here"
"""Stands where a run has its workloads' names."""


@dataclass(kw_only=True)
class Duel:
    """What came of it so far."""

    baseline: str
    smallest_effect: float
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by arm, the baseline's twin and the canary too
    judgements: dict[str, Judgement] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    decided_s: dict[str, float] = field(default_factory=dict)  # after how many seconds each verdict was found
    spent_s: float = 0.0
    num_visits: int = 0
    gauge: Gauge = field(default_factory=Gauge)

    @property
    def void(self) -> set[Block]:
        """The blocks that were disturbed."""
        return self.gauge.void.get(HERE, set())

    @property
    def floor(self) -> Estimate | None:
        """The ratio of the baseline to itself."""
        return paired_ratio(pairs(self.samples[twin(self.baseline)], self.samples[self.baseline], self.void))

    def judge(self, names: list[str]) -> None:
        """Say of these arms what their pairs say now."""
        limit = margin(self.floor, self.smallest_effect)
        for name in names:
            twins = self.samples[twin(self.baseline)]
            found = judge(pairs(self.samples[name], self.samples[self.baseline], self.void, twins), limit)
            if found is not None:
                self.judgements[name] = found
        told = decide(list(self.judgements.values()))
        self.verdicts = dict(zip(self.judgements, told, strict=True))
        for name in names:
            if self.verdicts.get(name, Verdict.undecided) is not Verdict.undecided:
                self.decided_s.setdefault(name, self.spent_s)


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
    """Time each of `calls` against `calls[baseline]` until every verdict is found or `budget_s` is spent.

    Without `stops`, the budget is spent to its end, whatever is found. `gauge_work` is the canary's, by default a small
    matrix product and a copy. A difference below `smallest_effect` is nothing that matters.

    Raises:
        ValueError: the baseline is not among the calls.
    """
    if baseline not in calls:
        raise ValueError(f"the baseline {baseline} is not among the calls: {', '.join(calls)}")
    clock = clock or CpuClock()
    arms = {name: measure.Arm(name=name, call=call) for name, call in calls.items()}
    arms[twin(baseline)] = measure.Arm(name=twin(baseline), call=calls[baseline])
    arms[CANARY] = measure.canary_arm(CANARY, gauge_work or canary())
    found = Duel(baseline=baseline, smallest_effect=smallest_effect, samples={name: [] for name in arms})
    rivals = [name for name in calls if name != baseline]
    start, due = clock.now(), FEWEST_CLUSTERS
    while found.spent_s < budget_s or found.num_visits < FEWEST_CLUSTERS:
        seed_of_visit = visit_seed(seed, HERE, found.num_visits)
        at = measure.Visit(epoch=0, number=found.num_visits, num_blocks=num_blocks, seed=seed_of_visit)
        taken = measure.visit(list(arms.values()), clock, at)
        for name, samples in taken.items():
            found.samples[name].extend(samples)
        found.gauge.hear(HERE, taken[CANARY])
        found.num_visits += 1
        found.spent_s = clock.now() - start
        if found.num_visits >= due:
            due = max(due + 1, int(due * GROWTH))
            found.judge(rivals)
            if stops and len(found.decided_s) == len(rivals):
                return found
    found.judge(rivals)
    return found
