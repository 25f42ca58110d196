"""The order of visits: passes of fresh processes over open comparisons, balanced, and the same after a kill."""

import math
from collections.abc import Mapping
from itertools import pairwise

from attnbench.statistics.effects import WHOLE, effects, judge_effects
from attnbench.statistics.verdict import LOOKS
from attnbench.storage.events import ArmSamples, VisitFinished, WorkerStarted
from attnbench.storage.fold import State
from attnbench.storage.records import PROBE, Arm, Sample, Verdict
from attnbench.timing.schedule import DECIDED, Race, Step, visit_seed
from studies.simulated import virtual
from studies.simulated.virtual import ENVIRONMENT, plan

NAMES = ("baseline", "near", "far")
ASKED = plan(3, NAMES, budget_s=60.0, seed=3)
WORKLOADS = [workload.id for workload in ASKED.workloads]
LIVE = {workload: list(ASKED.specs) for workload in WORKLOADS}
LOGS = {
    "near": (math.log1p(ASKED.smallest_effect), 0.01),
    "far": (0.5, 0.01),
    "x": (math.log(1.5), 0.0),
    "y": (0.0, 0.4),
}
"""Log ratios, and by how much the number of a process swings around each. One is on the margin, and stays open."""


def start(state: State) -> None:
    state.apply(WorkerStarted(time="t", environment=ENVIRONMENT))


def visited(state: State, step: Step) -> VisitFinished:
    """Build a visit of two blocks; arms of a base have no log ratio."""
    epoch, number = state.num_workers - 1, state.num_visits[step.workload]
    taken = []
    for arm in [*step.arms, PROBE]:
        log, swing = (0.0, 0.0) if arm.side == "base" else LOGS.get(arm.implementation, (0.0, 0.0))
        value = 1e-3 * math.exp(log + (swing if number % 4 in {1, 2} else -swing))
        samples = tuple(Sample(value=value, epoch=epoch, visit=number, block=block) for block in range(2))
        taken.append(ArmSamples(arm=arm, samples=samples))
    return VisitFinished(workload=step.workload, epoch=epoch, visit=number, arms=tuple(taken), elapsed_s=1.0)


def steps(
    live: Mapping[str, list[Arm]] = LIVE, most: int = 1000, restarts_every: int = 1000
) -> tuple[list[Step], State, Race]:
    """Return all steps of a race up to its end."""
    state, taken = State(), list[Step]()
    for number in range(most):
        if number % restarts_every == 0:
            race = Race(ASKED)
        if (step := race.next(state, live)) is None:
            break
        if step.is_fresh:
            start(state)
        state.apply(visited(state, step))
        taken.append(step)
    return taken, state, race


def passes(taken: list[Step]) -> list[list[Step]]:
    starts = [place for place, step in enumerate(taken) if step.is_fresh]
    return [taken[start:end] for start, end in pairwise([*starts, len(taken)])]


def test_a_pass_visits_each_open_workload_once_in_a_process_of_its_own() -> None:
    taken, state, _ = steps()
    for each in passes(taken):
        assert sorted(step.workload for step in each) == sorted(WORKLOADS)
        assert [step.is_fresh for step in each] == [True, False, False]
    assert state.num_workers == len(passes(taken))
    assert len({tuple(step.workload for step in each) for each in passes(taken)}) > 1  # orders are random


def test_first_passes_hold_every_arm_and_later_ones_only_open_cells() -> None:
    taken, _, race = steps()
    found = passes(taken)
    assert len(found) == 64  # the last look
    for each in found[: ASKED.num_rounds]:
        assert {arm.implementation for step in each for arm in step.arms} == set(NAMES)
    for each in found[ASKED.num_rounds :]:
        assert {arm.implementation for step in each for arm in step.arms} == {"baseline", "near"}
    verdicts = {key[1].implementation: judgement.verdict for key, judgement in race.judged.items()}
    assert verdicts == {"near": Verdict.undecided, "far": Verdict.slower}


def test_without_the_baseline_the_others_are_compared_with_the_first_of_them() -> None:
    live = {workload: [arm for arm in arms if not ASKED.is_reference(arm)] for workload, arms in LIVE.items()}
    _, state, race = steps(live)
    assert race.judged.keys() == {(workload, Arm(implementation="far")) for workload in WORKLOADS}
    assert race.reason == DECIDED
    assert set(state.num_visits.values()) == {ASKED.num_rounds}


def test_processes_stay_balanced_over_comparisons_and_the_least_visited_comes_first() -> None:
    state, race = State(), Race(ASKED)
    start(state)
    behind = WORKLOADS[1]
    for workload in WORKLOADS:
        for _ in range(2 if workload == behind else 3):
            state.apply(visited(state, Step(workload=workload, arms=tuple(ASKED.specs))))
    step = race.next(state, LIVE)
    assert step is not None
    assert (step.workload, step.is_fresh) == (behind, True)


def test_what_follows_depends_on_the_journal_alone() -> None:
    """A race that restarts in the middle, as after a kill, continues as the first would have."""
    assert steps(most=30, restarts_every=3)[0] == steps(most=30)[0]


def test_an_arm_that_fails_is_visited_no_more() -> None:
    state, race = State(), Race(ASKED)
    step = race.next(state, LIVE)
    assert step is not None
    live = {workload: [arm for arm in arms if arm.implementation != "far"] for workload, arms in LIVE.items()}
    later = race.next(state, live)
    assert later is not None
    assert "far" not in {arm.implementation for arm in later.arms}
    assert race.next(state, {}) is None


def test_a_look_out_of_reach_is_said() -> None:
    _, state, race = steps(most=3 * ASKED.num_rounds)
    assert race.next(state, LIVE) is not None  # the fifth pass
    state.num_visits["failed for all"] = 1
    assert race.reaches_a_look(state, 4)
    assert not race.reaches_a_look(state, 3.9)


def test_a_pass_over_few_shapes_is_expected_to_be_short() -> None:
    """With 20 s left, full passes of 10 s reach no look; those over the one open shape of three do."""
    state, race, now_s = State(), Race(ASKED), 0.0
    decided = [arm for arm in ASKED.specs if arm.implementation != "near"]
    live = LIVE | dict.fromkeys(WORKLOADS[1:], decided)
    while (step := race.next(state, live, now_s)) is not None and now_s < 40.0 - 1e-6:
        if step.is_fresh:
            start(state)
        state.apply(visited(state, step))
        now_s += 10.0 / len(WORKLOADS)
    assert step is not None
    assert (step.workload, step.is_fresh, race.reason) == (WORKLOADS[0], True, "")


def test_all_cells_stay_open_until_the_whole_of_two_sides_is_decided() -> None:
    asked = virtual.with_sides(plan(2, ("x", "y"), budget_s=60.0))
    live = {workload.id: list(asked.specs) for workload in asked.workloads}
    state, race = State(), Race(asked)
    for _ in range(4):
        start(state)
        for workload, arms in live.items():
            state.apply(visited(state, Step(workload=workload, arms=tuple(arms))))
    opened = race.open(state, live)
    assert race.judged[WHOLE].verdict is Verdict.undecided
    verdicts = {judgement.verdict for key, judgement in race.judged.items() if key[1].implementation == "x"}
    assert verdicts == {Verdict.slower}
    assert all(len(arms) == len(live[workload]) for workload, arms in opened.items())


def test_the_seed_of_a_visit_follows_from_run_workload_and_number() -> None:
    assert visit_seed(0, "a", 1) == visit_seed(0, "a", 1)
    assert len({visit_seed(*each) for each in ((0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2))}) == 4


def test_one_cell_of_two_sides_is_one_comparison() -> None:
    asked = virtual.with_sides(plan(1, ("x",), budget_s=60.0))
    (key,) = [(asked.workloads[0].id, arm) for arm in asked.specs if not asked.is_reference(arm)]
    known = effects(asked, {key: {(epoch, 0): 0.1 * epoch for epoch in range(4)}})  # no clear difference
    found = judge_effects(asked, known)
    assert (found[key].level, found[WHOLE].level) == (asked.false_share / len(LOOKS),) * 2
