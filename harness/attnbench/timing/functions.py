"""Compare a few functions in this process: timed as a run does, without files and workers.

All visits share the memory layout of one process, which moves a ratio by up to 3 %. So nothing below that is decided,
however many visits there are. Used by the doctor, the acceptance tests and the fixture `attention_bench`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from attnbench.devices import Clock, device
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import Block
from attnbench.statistics.verdict import LOOKS, Effect, Judgement, effect
from attnbench.storage.events import ArmSamples, Plan, VisitFinished
from attnbench.storage.records import FALSE_SHARE, LATENCY, PROBE, Arm, Key, Sample, Verdict
from attnbench.timing import blocks
from attnbench.timing.schedule import (
    DECIDED,
    SPENT,
    Live,
    State,
    Step,
    cell_numbers,
    control_numbers,
    effects,
    follow,
    judged,
    load_libraries,
    visit_seed,
)
from attnbench.workloads.sweep import SMALLEST_EFFECT

HERE = "here"
"""Stands in for the workload's name that a run has."""


@dataclass
class Repeat:
    """A strategy for one process: all arms, until every comparison is decided or can be no more.

    Without `stops`, all of the budget is spent.
    """

    plan: Plan
    stops: bool = True
    reason: str = ""

    def next(self, state: State, live: Live, now_s: float = 0.0) -> Step | None:
        """All arms once more."""
        number = state.num_visits[HERE]
        is_first = number < LOOKS[0]
        is_look = self.stops and number % LOOKS[0] == 0  # some visits may have no undisturbed block
        if not is_first and now_s >= self.plan.budget_s:
            self.reason = SPENT
        elif not is_first and is_look and not any(each.needs_more for each in judged_here(self.plan, state).values()):
            self.reason = DECIDED
        return None if self.reason else Step(workload=HERE, arms=tuple(live[HERE]))


def judged_here(plan: Plan, state: State) -> dict[Key, Judgement]:
    """The verdicts on what was sampled in this process."""
    taken, discarded = state.samples.get(HERE, {}), state.gauge.discarded.get(HERE, set())
    return judged(plan, effects(plan, cell_numbers(plan, HERE, taken, discarded, plan.specs)))


class FunctionComparison:
    """A comparison of each of `calls` with `calls[baseline]`; the method `run` takes its visits.

    A difference below `smallest_effect` does not matter. `gauge_work` is the interference probe's, by default a small
    matrix product and a copy. `false_share` is what share of sessions of identical code may call it faster or slower,
    at most. `clock` and `conditions` are this machine's unless others are given, as where it is simulated.

    Raises:
        ValueError: the baseline is not among the calls.
    """

    def __init__(  # noqa: PLR0913 - all but the first two have defaults that serve
        self,
        calls: Mapping[str, Callable[[], object]],
        baseline: str,
        *,
        smallest_effect: float = SMALLEST_EFFECT,
        false_share: float = FALSE_SHARE,
        clock: Clock | None = None,
        num_blocks: int = 4,
        seed: int = 0,
        gauge_work: Callable[[], object] | None = None,
        conditions: blocks.Conditions | None = None,
    ) -> None:
        """Import what judging needs, and note the time."""
        if baseline not in calls:
            raise ValueError(f"the baseline {baseline} is not among the calls: {', '.join(calls)}")
        load_libraries()
        self.arms = {name: Arm(implementation=name) for name in calls}
        self.reference = self.arms[baseline]
        self.calls = [blocks.TimedCall(arm=self.arms[name], call=call) for name, call in calls.items()]
        self.calls.append(blocks.TimedCall(arm=self.reference.as_control(), call=calls[baseline]))
        self.calls.append(blocks.TimedCall(arm=PROBE, call=gauge_work or device("cpu").interference_probe()))
        self.plan = Plan(
            sweep=HERE,
            workloads=(),
            implementations=tuple(calls),
            baseline=baseline,
            metrics=(LATENCY,),
            budget_s=0.0,
            call_limit_s=0.0,
            timeout_s=0.0,
            memory_limit_bytes=0,
            num_blocks=num_blocks,
            smallest_effect=smallest_effect,
            false_share=false_share,
            seed=seed,
        )
        self.clock = clock or device("cpu").clock
        self.conditions = conditions or blocks.Conditions()
        self.state = State()
        self.visits: list[VisitFinished] = []
        self.judgements: dict[str, Judgement] = {}
        self.settled_s: dict[str, float] = {}  # after how many seconds each verdict was settled
        self.spent_s, self.start_s = 0.0, self.clock.now()

    @property
    def num_visits(self) -> int:
        """Visits so far."""
        return self.state.num_visits[HERE]

    @property
    def samples(self) -> Mapping[Arm, Sequence[Sample]]:
        """Those of each arm, in time order."""
        return self.state.samples.get(HERE, {})

    @property
    def gauge(self) -> InterferenceGauge:
        """What the interference probes show."""
        return self.state.gauge

    @property
    def discarded(self) -> set[Block]:
        """The blocks that were disturbed."""
        return self.gauge.discarded.get(HERE, set())

    @property
    def noise(self) -> Effect:
        """The ratio of the baseline to itself, over visits."""
        found = control_numbers(self.samples, self.reference, self.discarded)
        return effect([*found.values()] or [0.0], is_watched=False)

    def run(self, budget_s: float, *, stops: bool = True) -> None:
        """Visit until every verdict is decided, or none can be any more, or `budget_s` is spent.

        Without `stops`, all of the budget is spent.
        """
        strategy = Repeat(msgspec.structs.replace(self.plan, budget_s=max(0.0, budget_s)), stops)
        live = {HERE: [*self.arms.values()]}
        follow(strategy, self.state, lambda: live, lambda: self.spent_s, lambda _: self.visit())
        self.judge()

    def visit(self) -> None:
        """Take one more visit."""
        number = self.num_visits
        at = blocks.Visit(
            epoch=0,
            number=number,
            num_blocks=self.plan.num_blocks,
            seed=visit_seed(self.plan.seed, HERE, number),
            known=blocks.known(self.samples),
        )
        taken = blocks.visit(self.calls, self.clock, at, self.conditions)
        arms = tuple(ArmSamples(arm=arm, samples=samples) for arm, samples in taken.items())
        self.visits.append(VisitFinished(workload=HERE, epoch=0, visit=number, arms=arms))
        self.state.apply(self.visits[-1])
        self.spent_s = self.clock.now() - self.start_s
        if self.num_visits % LOOKS[0] == 0:
            self.judge()

    def judge(self) -> None:
        """Judge every rival by what was sampled so far."""
        self.judgements = {arm.implementation: each for (_, arm), each in judged_here(self.plan, self.state).items()}
        for name, each in self.judgements.items():
            if each.verdict is not Verdict.undecided:
                self.settled_s.setdefault(name, self.spent_s)
