"""Compare a few functions in this process: timed as a run does, without files and workers.

All visits share the memory layout of one process, which moves a ratio by up to 3 %. So nothing below that is decided,
however many visits there are. Used by the doctor, the acceptance tests and the fixture `attention_bench`.
"""

from collections.abc import Callable, Mapping

from attnbench.devices import Clock, device
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import Block, effect_of, visit_numbers
from attnbench.statistics.verdict import LOOKS, Effect, Judgement, effect, judge
from attnbench.storage.records import FALSE_SHARE, PROBE, Arm, Sample, Verdict
from attnbench.timing import blocks
from attnbench.timing.schedule import load_libraries, visit_seed
from attnbench.workloads.sweep import SMALLEST_EFFECT

HERE = "here"
"""Stands in for the workload's name that a run has."""


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
        self.baseline, self.reference = baseline, Arm(implementation=baseline)
        self.control = self.reference.as_control()
        self.rivals = [name for name in calls if name != baseline]
        self.calls = [blocks.TimedCall(arm=Arm(implementation=name), call=call) for name, call in calls.items()]
        self.calls.append(blocks.TimedCall(arm=self.control, call=calls[baseline]))
        self.calls.append(blocks.TimedCall(arm=PROBE, call=gauge_work or device("cpu").interference_probe()))
        self.smallest_effect, self.num_blocks, self.seed = smallest_effect, num_blocks, seed
        self.false_share = false_share
        self.clock = clock or device("cpu").clock
        self.conditions = conditions or blocks.Conditions()
        self.samples: dict[Arm, list[Sample]] = {}
        self.judgements: dict[str, Judgement] = {}
        self.settled_s: dict[str, float] = {}  # after how many seconds each verdict was settled
        self.gauge = InterferenceGauge()
        self.num_visits, self.spent_s = 0, 0.0
        self.start_s = self.clock.now()

    @property
    def discarded(self) -> set[Block]:
        """The blocks that were disturbed."""
        return self.gauge.discarded.get(HERE, set())

    @property
    def noise(self) -> Effect:
        """The ratio of the baseline to itself, over visits."""
        found = visit_numbers([self.samples[self.control]], [self.samples[self.reference]], self.discarded)
        return effect([*found.values()] or [0.0], is_watched=False)

    def run(self, budget_s: float, *, stops: bool = True) -> None:
        """Visit until every verdict is decided, or none can be any more, or `budget_s` is spent.

        Without `stops`, all of the budget is spent.
        """
        while self.spent_s < budget_s or self.num_visits < LOOKS[0]:
            self.visit()
            if stops and self.num_visits % LOOKS[0] == 0:  # some visits may have no undisturbed block
                self.judge()
                if not any(judged.needs_more for judged in self.judgements.values()):
                    return
        self.judge()

    def visit(self) -> None:
        """Take one more visit."""
        seed = visit_seed(self.seed, HERE, self.num_visits)
        at = blocks.Visit(
            epoch=0,
            number=self.num_visits,
            num_blocks=self.num_blocks,
            seed=seed,
            known=blocks.known(self.samples),
        )
        taken = blocks.visit(self.calls, self.clock, at, self.conditions)
        for arm, samples in taken.items():
            self.samples.setdefault(arm, []).extend(samples)
        self.gauge.add(HERE, taken[PROBE])
        self.num_visits += 1
        self.spent_s = self.clock.now() - self.start_s

    def judge(self) -> None:
        """Judge every rival by what was sampled so far."""
        both = [self.samples[self.reference], self.samples[self.control]]
        found = {
            name: visit_numbers([self.samples[Arm(implementation=name)]], both, self.discarded) for name in self.rivals
        }
        effects = {name: effect_of(own) for name, own in found.items() if own}
        self.judgements = judge(effects, self.smallest_effect, self.false_share)
        for name, judged in self.judgements.items():
            if judged.verdict is not Verdict.undecided:
                self.settled_s.setdefault(name, self.spent_s)
