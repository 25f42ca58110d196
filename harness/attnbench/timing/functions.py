"""Compare a few functions in this process: they are timed as in a run, but without files and worker processes.

All samples share the memory layout of one process, which shifts a ratio of times by up to 3 %, so smaller differences
stay undecided.
"""

from collections.abc import Callable, Mapping

from attnbench.devices import Clock, device
from attnbench.statistics.effects import Taken, effects, judge_effects, run_numbers
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import Block
from attnbench.statistics.verdict import LOOKS, Judgement
from attnbench.storage.events import ArmSamples, Plan, VisitFinished
from attnbench.storage.fold import State
from attnbench.storage.records import LATENCY, PROBE, Arm
from attnbench.timing import blocks
from attnbench.timing.schedule import DECIDED, SPENT, Live, Step, load_libraries, run_strategy, visit_seed
from attnbench.workloads.sweep import SMALLEST_EFFECT

HERE = "here"  # name of the only workload


class FunctionComparison:
    """A comparison of each function in `calls` with `calls[baseline]`; it decides for how long they are timed.

    The functions are timed in visits, that is, short series of `num_blocks` blocks. A relative difference below
    `smallest_effect` does not matter. If all functions are identical, the probability that any is judged faster or
    slower is at most FALSE_SHARE. The interference probe, whose times show whether other work disturbs the machine,
    calls `gauge_work`, by default a small matrix product and a copy. The default `clock` and `conditions` are those of
    this machine.

    Raises:
        ValueError: the baseline is not among the calls.
    """

    def __init__(  # noqa: PLR0913 - all but the first two have useful defaults
        self,
        calls: Mapping[str, Callable[[], object]],
        baseline: str,
        *,
        smallest_effect: float = SMALLEST_EFFECT,
        clock: Clock | None = None,
        num_blocks: int = 4,
        seed: int = 0,
        gauge_work: Callable[[], object] | None = None,
        conditions: blocks.Conditions | None = None,
    ) -> None:
        if baseline not in calls:
            raise ValueError(f"the baseline {baseline} is not among the calls: {', '.join(calls)}")
        load_libraries()
        self.reference = Arm(implementation=baseline)
        self.calls = [blocks.TimedCall(arm=Arm(implementation=name), call=call) for name, call in calls.items()]
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
            num_blocks=num_blocks,
            smallest_effect=smallest_effect,
            seed=seed,
        )
        self.clock = clock or device("cpu").clock
        self.conditions = conditions or blocks.Conditions()
        self.state, self.gauge = State(), InterferenceGauge()
        self.judgements: dict[str, Judgement] = {}
        self.reason, self.stops, self.until_s = "", True, 0.0
        self.spent_s, self.start_s = 0.0, self.clock.now()

    @property
    def samples(self) -> Taken:
        """The samples of each function (arm) and of the interference probe, in time order."""
        return self.state.samples.get(HERE, {})

    @property
    def discarded(self) -> set[Block]:
        """Blocks that are not compared, because other work disturbed them."""
        return self.gauge.follow(self.state.probes).get(HERE, set())

    def run(self, budget_s: float, *, stops: bool = True) -> None:
        """Time the functions until no verdict can change, or until `budget_s` seconds after this object was created.

        There are at least LOOKS[0] visits (short series of timed blocks). If `stops` is False, visits go on for
        `budget_s` seconds even if no verdict can change.
        """
        self.reason, self.stops, self.until_s = "", stops, max(0.0, budget_s)
        live = {HERE: [*self.plan.specs]}
        run_strategy(self, self.state, lambda: live, lambda: self.spent_s, lambda _: self.visit())
        self.judge()

    def next(self, state: State, live: Live, now_s: float) -> Step | None:
        """Return the next visit, with all functions; None once the verdicts are final or the budget is spent."""
        number = state.num_visits[HERE]
        if number >= LOOKS[0] and now_s >= self.until_s:
            self.reason = SPENT
        elif number and number % LOOKS[0] == 0:  # not only at LOOKS, since a fully disturbed visit does not count
            self.judge()
            if self.stops and not any(each.needs_more for each in self.judgements.values()):
                self.reason = DECIDED
        return None if self.reason else Step(workload=HERE, arms=tuple(live[HERE]))

    def visit(self) -> None:
        """Time every function in a few more blocks (in each block once, in random order), and store the samples."""
        number = self.state.num_visits[HERE]
        at = blocks.Visit(
            epoch=0,
            number=number,
            num_blocks=self.plan.num_blocks,
            seed=visit_seed(self.plan.seed, HERE, number),
            known=blocks.known(self.samples),
        )
        taken = blocks.visit(self.calls, self.clock, at, self.conditions)
        arms = tuple(ArmSamples(arm=arm, samples=samples) for arm, samples in taken.items())
        self.state.apply(VisitFinished(workload=HERE, epoch=0, visit=number, arms=arms))
        self.spent_s = self.clock.now() - self.start_s

    def judge(self) -> None:
        """Judge every function except the baseline, from the samples so far."""
        pairs = {HERE: dict.fromkeys(self.plan.specs, self.reference)}
        numbers = run_numbers(self.state.samples, pairs, self.gauge.follow(self.state.probes))
        known = judge_effects(self.plan, effects(self.plan, numbers))
        self.judgements = {arm.implementation: each for (_, arm), each in known.items()}
