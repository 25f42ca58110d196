"""Choosing without any process: the next visit depends on the folded state alone."""

import math
import random

import msgspec

from attnbench.processes.planning import build_plan, plan_to_choose
from attnbench.statistics.choice import CHOOSING_PROCESSES
from attnbench.storage.events import ArmSamples, Plan, VisitFinished
from attnbench.storage.fold import State
from attnbench.storage.records import PROBE, Arm, Sample, Status
from attnbench.timing.schedule import ANSWERED, SPENT, Choice, Step, Strategy, follow

NAMES = ("sdpa", "fused", "bmm")
VISIT_S = 0.01
CROSSING = 1000


class Machine:
    """Answers each step at once; `fused` is faster than the others up to a length of a thousand."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.state = plan, State()
        self.by_id = {each.id: each for each in plan.workloads}
        self.elapsed_s, self.draws, self.taken = 0.0, random.Random(1), list[Step]()

    def seconds(self, workload: str, arm: Arm) -> float:
        slope = {"fused": 1.5, "bmm": 1.5}.get(arm.implementation, 1.0)
        start = {"bmm": 1.2}.get(arm.implementation, 1.0)
        return 1e-3 * start * (self.by_id[workload].seq_len / CROSSING) ** slope

    def visit(self, step: Step) -> None:
        self.state.num_workers += step.is_fresh
        epoch, number = self.state.num_workers - 1, self.state.num_visits[step.workload]
        arms = [*step.arms, PROBE, *(arm.as_control() for arm in step.arms if self.plan.is_reference(arm))]
        taken = tuple(
            ArmSamples(
                arm=arm,
                samples=tuple(
                    Sample(
                        value=(1e-4 if arm == PROBE else self.seconds(step.workload, arm.as_measured()))
                        * math.exp(self.draws.gauss(0, 0.003)),
                        epoch=epoch,
                        visit=number,
                        block=block,
                    )
                    for block in range(4)
                ),
            )
            for arm in arms
        )
        self.elapsed_s += VISIT_S
        self.state.apply(VisitFinished(workload=step.workload, epoch=epoch, visit=number, arms=taken))
        self.taken.append(step)

    def follow(self, strategy: Strategy) -> str:
        live = {each.id: self.state.live(each.id, self.plan.specs) for each in self.plan.asked}
        return follow(strategy, self.state, lambda: live, lambda: self.elapsed_s, self.visit)


def chosen() -> Machine:
    selection = build_plan(sweep="fastest", settings=("seq_len=512",), is_exact=True, implementations=NAMES, seed=3)
    planned = msgspec.structs.replace(plan_to_choose(selection), budget_s=60.0)
    machine = Machine(planned)
    for workload in machine.plan.asked:
        for arm in machine.plan.specs:
            machine.state.conclude((workload.id, arm), Status.ok)
    return machine


def test_choosing_takes_passes_and_ends_as_soon_as_the_answer_is_clear() -> None:
    machine = chosen()
    assert machine.follow(Choice(machine.plan)) == ANSWERED
    assert all(step.is_fresh for step in machine.taken)
    assert len(machine.taken) == CHOOSING_PROCESSES
    assert set(machine.taken[0].arms) == set(machine.plan.specs)


def test_choosing_ends_with_its_share_of_the_budget_but_never_before_the_first_processes() -> None:
    machine = chosen()
    machine.seconds = lambda workload, arm: 1e-3  # type: ignore[method-assign] # equal within less than noise shows
    plan = msgspec.structs.replace(machine.plan, smallest_effect=1e-6, budget_s=0.0)
    assert machine.follow(Choice(plan)) == SPENT
    assert len(machine.taken) == CHOOSING_PROCESSES
