"""Strategies without any process: what is visited follows from the folded state alone."""

import math
import random

import msgspec
import pytest

from attnbench.processes.planning import build_plan, plan_to_choose, plan_to_search
from attnbench.statistics.verdict import FEWEST_PROCESSES
from attnbench.storage.events import ArmSamples, Plan, VisitFinished
from attnbench.storage.records import PROBE, Arm, Sample, Status
from attnbench.timing.schedule import SPENT, State, Step, Strategy, follow
from attnbench.timing.strategies import ANSWERED, CHOOSING_PROCESSES, SEARCHED, Choice, Search
from attnbench.workloads.workload import Workload

NAMES = ("sdpa", "fused", "bmm")
VISIT_S = 0.01
CROSSING = 1000


class Machine:
    """Answers each step at once; `fused` is faster than the others up to a length of a thousand."""

    def __init__(self, plan: Plan, *, is_supported: bool = True) -> None:
        self.plan, self.state, self.is_supported = plan, State(), is_supported
        self.by_id = {each.id: each for each in plan.workloads}
        self.elapsed_s, self.draws, self.taken = 0.0, random.Random(1), list[Step]()

    def seconds(self, workload: str, arm: Arm) -> float:
        slope = {"fused": 1.5, "bmm": 1.5}.get(arm.implementation, 1.0)
        start = {"bmm": 1.2}.get(arm.implementation, 1.0)
        return 1e-3 * start * (self.by_id[workload].seq_len / CROSSING) ** slope

    def check(self, workload: Workload, arm: Arm, call_limit_s: float) -> None:
        assert call_limit_s >= 0
        is_ok = self.is_supported or arm.implementation == "sdpa"
        self.state.conclude((workload.id, arm), Status.ok if is_ok else Status.unsupported)

    def predict(self, workload: Workload, call_limit_s: float) -> dict[Arm, float]:
        assert call_limit_s > 0
        return {arm: self.seconds(workload.id, arm) for arm in self.plan.specs}

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


def chosen(*, searches: bool) -> Machine:
    selection = build_plan(sweep="fastest", settings=("seq_len=512",), is_exact=True, implementations=NAMES, seed=3)
    planned = msgspec.structs.replace(plan_to_choose(selection, searches=searches), budget_s=60.0)
    machine = Machine(
        msgspec.structs.replace(planned, workloads=planned.workloads[:1] if not searches else planned.workloads)
    )
    for workload in machine.plan.asked:
        for arm in machine.plan.specs:
            machine.check(workload, arm, 1.0)
    return machine


def searching(budget_s: float = 60.0, **more: bool) -> Machine:
    selection = build_plan(sweep="fastest", settings=("seq_len=512",), is_exact=True, implementations=NAMES[:2], seed=3)
    return Machine(
        msgspec.structs.replace(plan_to_search(selection, NAMES[:2], "seq_len", 64, 8192), budget_s=budget_s), **more
    )


def test_choosing_takes_passes_and_ends_as_soon_as_the_answer_is_clear() -> None:
    machine = chosen(searches=False)
    assert machine.follow(Choice(machine.plan)) == ANSWERED
    assert all(step.is_fresh for step in machine.taken)
    assert len(machine.taken) == CHOOSING_PROCESSES
    assert set(machine.taken[0].arms) == set(machine.plan.specs)


def test_choosing_ends_with_its_share_of_the_budget_but_never_before_the_first_processes() -> None:
    machine = chosen(searches=False)
    machine.seconds = lambda workload, arm: 1e-3  # type: ignore[method-assign] # equal within less than noise shows
    plan = msgspec.structs.replace(machine.plan, smallest_effect=1e-6, budget_s=0.0)
    assert machine.follow(Choice(plan)) == SPENT
    assert len(machine.taken) == CHOOSING_PROCESSES


def test_a_search_halves_the_way_to_where_two_change_places() -> None:
    machine = searching()
    assert machine.follow(Search(machine.plan, machine)) == SEARCHED
    assert all(step.is_fresh for step in machine.taken)
    lengths = [machine.by_id[step.workload].seq_len for step in machine.taken]
    looked = list(dict.fromkeys(lengths))
    assert looked[:2] == [64, 8192]
    assert min(abs(math.log(length / CROSSING)) for length in looked[-3:]) < math.log(1.2)
    assert all(lengths.count(length) >= FEWEST_PROCESSES for length in looked)


def test_a_search_goes_on_where_it_was() -> None:
    """A strategy that begins anew on the same state visits no value again that is decided."""
    machine = searching()
    strategy = Search(machine.plan, machine)
    for _ in range(3 * FEWEST_PROCESSES):
        step = strategy.next(machine.state, {}, machine.elapsed_s)
        assert step is not None
        machine.visit(step)
    before = len(machine.taken)
    assert machine.follow(Search(machine.plan, machine)) == SEARCHED
    decided = {step.workload for step in machine.taken[: before - FEWEST_PROCESSES]}
    assert not decided & {step.workload for step in machine.taken[before:]}


@pytest.mark.parametrize(("budget_s", "more"), [(0.0, {}), (60.0, {"is_supported": False})])
def test_a_search_without_time_or_without_two_that_can_be_timed_visits_nothing(budget_s, more) -> None:
    machine = searching(budget_s, **more)
    assert machine.follow(Search(machine.plan, machine)) == (SEARCHED if budget_s else SPENT)
    assert not machine.taken


def test_a_search_around_the_choice_finds_who_is_the_fastest_beyond_the_crossing() -> None:
    machine = chosen(searches=True)
    assert machine.follow(Choice(machine.plan)) == ANSWERED
    before = len(machine.taken)
    assert machine.follow(Search(machine.plan, machine)) == SEARCHED
    later = [machine.by_id[step.workload].seq_len for step in machine.taken[before:]]
    assert max(later) == 8192
    assert any(abs(math.log(length / CROSSING)) < math.log(1.3) for length in later)
