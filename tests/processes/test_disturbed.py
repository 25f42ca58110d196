"""Other work on the machine: no output gives a verdict on a time that it may have changed."""

import random
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import typer

from attnbench.analysis.comparisons import (
    cell_doubts,
    comparisons,
    contention,
    doubts,
    judgements,
    whole_session_judgement,
)
from attnbench.analysis.conclusion import Conclusion, Mark
from attnbench.analysis.gate.decision import judge_sides
from attnbench.analysis.gate.rulings import Kind, Thresholds
from attnbench.analysis.history import _points
from attnbench.analysis.policy import learn
from attnbench.analysis.recommendation import recommend
from attnbench.analysis.results import Results
from attnbench.analysis.sanity import SystemLoad
from attnbench.analysis.table import rows, table
from attnbench.commands import frame
from attnbench.devices.waiting import Waits
from attnbench.processes.planning import build_plan, plan_to_choose, plan_to_search
from attnbench.reports import answers, exit_status, recommended, summary
from attnbench.reports.pytest_benchmark import document
from attnbench.statistics.verdict import Reason
from attnbench.storage.events import Plan
from attnbench.storage.records import LATENCY, Verdict
from attnbench.timing.blocks import Conditions
from attnbench.workloads.workload import Workload
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS

FEW, MOST = 0.15, 0.75
"""Shares of samples whose threads wait for a processor: too few to move a median, and most."""
NAMES = ("sdpa", "fused", "bmm")
HOT = 0x8  # the driver's word for a hardware slowdown
SPEEDS = {"sdpa": 1.0, "fused": 0.7, "bmm": 1.4, "x": 1.0}


@pytest.fixture(autouse=True)
def quiet_processors() -> None:
    """Restore the real rule: each test here sets the load."""


class Waiting(virtual.SimulatedClient):
    """In each sample the threads of the process may wait, by the system's counters; its times do not change."""

    def __init__(self, share: float, seconds: virtual.Seconds) -> None:
        super().__init__(WORLDS["calm"], seconds, layout=0.003)
        self.share, self.waited_s, self.draws = share, 0.0, random.Random(1)

    def _conditions(self, num_slots: int, *, is_cold: bool) -> Conditions:
        def waits() -> Waits:
            self.waited_s += float(self.draws.random() < self.share)
            return {"1": self.waited_s}

        return replace(super()._conditions(num_slots, is_cold=is_cold), read_waits=waits)


def seconds(workload: Workload, name: str) -> float:
    """Return times in which the candidate of two sides is slower than its base."""
    return 1e-5 * workload.seq_len * SPEEDS[name.removesuffix(" (base)")] * (0.8 if name.endswith(")") else 1.0)


def sweep(folder: Path, share: float, plan: Plan | None = None) -> Results:
    asked = plan or virtual.plan(2, NAMES, budget_s=20.0)
    return virtual.execute(asked, folder / "run", Waiting(share, seconds))


def sides(folder: Path, share: float) -> Results:
    return sweep(folder, share, virtual.with_sides(virtual.plan(2, ("x",), budget_s=20.0)))


def exit_code(conclusion: Conclusion) -> int:
    with pytest.raises(typer.Exit) as left:
        frame.finish(conclusion)
    return left.value.exit_code


@pytest.mark.parametrize(("share", "is_doubtful"), [(0.0, False), (FEW, False), (MOST, True)])
def test_a_run_whose_samples_waited_says_so_first_and_decides_nothing(tmp_path, share, is_doubtful):
    results = sweep(tmp_path, share)
    found = {each.verdict for each in judgements(results).values()}
    assert found == ({Verdict.undecided} if is_doubtful else {Verdict.faster, Verdict.slower})
    assert ("waited for a processor" in "".join(summary.troubles(results)[:1])) is is_doubtful
    assert exit_code(exit_status.of_run(results)) == (3 if is_doubtful else 0)
    if is_doubtful:
        assert {each.reason for each in comparisons(results)} == {str(Reason.doubtful)}
        assert not re.search("faster|slower|equal", "".join(summary.answer(results)))


@pytest.mark.parametrize(("share", "code"), [(FEW, 1), (MOST, 4)])
def test_compare_and_gate_end_alike_on_a_session_whose_samples_waited(tmp_path, share, code):
    results = sides(tmp_path, share)
    decision, conclusion = judge_sides(results, Thresholds()), exit_status.of_sides(results)
    found = whole_session_judgement(results)
    assert found is not None
    assert found.verdict is (Verdict.slower if code == 1 else Verdict.undecided)
    assert exit_code(conclusion) == exit_code(decision.conclusion) == code
    kinds = {ruling.kind for ruling in decision.rulings if ruling.metric == "latency"}
    assert kinds == {Kind.slower if code == 1 else Kind.undecided}
    shown = {cell.mark for shape in answers.shapes(results) for cell in shape.others}
    assert shown == {Mark.slower if code == 1 else Mark.doubtful}


def test_a_doubtful_shape_leaves_the_others_their_verdicts(tmp_path):
    """Its own verdict and that of all cells together are open, so nothing may pass."""
    results = sides(tmp_path, 0.0)
    first, second = results.plan.workloads
    results = replace(results, throttled={first.id: HOT})
    marks = {shape.workload.id: cell.mark for shape in answers.shapes(results) for cell in shape.others}
    assert marks == {first.id: Mark.doubtful, second.id: Mark.slower}
    decision = judge_sides(results, Thresholds())
    kinds = {each.workload: each.kind for each in decision.rulings if each.metric == "latency"}
    assert kinds == {first.id: Kind.undecided, second.id: Kind.slower}
    assert (decision.suite.kind, exit_code(exit_status.of_sides(results))) == (Kind.undecided, 1)


def chosen(folder: Path, share: float, *lengths: str) -> Results:
    settings = ("seq_len=" + ",".join(lengths), "mask=none")
    selection = build_plan(sweep="fastest", settings=settings, is_exact=True, implementations=NAMES, seed=3)
    return sweep(folder, share, msgspec.structs.replace(plan_to_choose(selection), budget_s=40.0))


@pytest.mark.parametrize("share", [FEW, MOST])
def test_the_fastest_of_a_disturbed_run_is_not_clear(tmp_path, share):
    results = chosen(tmp_path, share, "256")
    (found,) = recommend(results)
    assert found.is_clear is (share == FEW)
    assert exit_code(exit_status.of_choice(results, [found])) == 3 - 3 * found.is_clear
    if share == MOST:
        assert recommended.answer(found).startswith("Not clear: ")


def test_a_doubtful_shape_leaves_the_others_their_fastest_and_is_marked_everywhere(tmp_path):
    results = chosen(tmp_path, 0.0, "256", "512")
    first, second = results.plan.asked
    results = replace(results, throttled={first.id: HOT})
    assert {found.workload: found.is_clear for found in recommend(results)} == {first: False, second: True}
    marked = [(row["workload"], row["implementation"]) for row in rows(table(results)) if row["doubtful"]]
    assert sorted(marked) == sorted((first.id, name) for name in NAMES)
    noted = [each["param"] for each in document(results)["benchmarks"] if each["extra_info"]["doubtful"]]
    assert noted == [first.id] * len(NAMES)
    followed = {(point["workload"], point["implementation"]) for point in _points(results)[LATENCY]}
    assert len(followed) == len(NAMES)


def test_a_throttled_device_makes_a_single_implementation_doubtful(tmp_path):
    results = sweep(tmp_path, 0.0, virtual.plan(1, ("sdpa",), budget_s=2.0))
    (record,) = results.records
    assert list(cell_doubts(replace(results, throttled={record.workload.id: HOT}))) == [record.key]


@pytest.mark.parametrize(("share", "winner"), [(FEW, "fused"), (MOST, "sdpa")])
def test_a_policy_learns_nothing_from_a_disturbed_run(tmp_path, share, winner):
    assert {row.winner for row in learn(sweep(tmp_path, share)).rows} == {winner}


@pytest.mark.parametrize("share", [FEW, MOST])
def test_a_search_in_a_disturbed_run_decides_no_length(tmp_path, share):
    def crossing(workload: Workload, name: str) -> float:
        return {"sdpa": 1e-3, "fused": 1e-6 * workload.seq_len}[name] * 3

    settings = ("mask=none", "direction=forward")
    selection = build_plan(
        sweep="fastest", settings=settings, is_exact=True, implementations=("fused", "sdpa"), seed=3, budget_s=30.0
    )
    asked = plan_to_search(selection, ("fused", "sdpa"), "seq_len", 64, 4096)
    results = virtual.execute(asked, tmp_path / "run", Waiting(share, crossing))
    (crossing,) = recommended.crossings(results)
    assert bool(crossing.changes) is (share == FEW)
    assert crossing.answer.startswith("From " if share == FEW else "It is undecided which ")
    assert exit_code(exit_status.of_search(results)) == (0 if share == FEW else 3)


BUSY = SystemLoad(stolen=0.0, others=0.6, free_bytes=2**30)


@pytest.mark.parametrize(
    ("share", "load", "is_doubtful"),
    [
        (0.0, BUSY, False),  # its threads never waited for a processor, in spite of other load
        (0.0, replace(BUSY, others=0.0, stolen=0.3), True),  # processes cannot see the steal time of their host
        (0.0, replace(BUSY, others=0.03), False),
        (None, BUSY, True),
        (None, replace(BUSY, others=0.03), False),
    ],
)
def test_contention_is_said_in_any_case_and_a_doubt_if_nothing_shows_what_it_cost(tmp_path, share, load, is_doubtful):
    asked = virtual.plan(1, NAMES, budget_s=9.0)
    client = virtual.SimulatedClient(WORLDS["calm"], seconds) if share is None else Waiting(share, seconds)
    results = replace(virtual.execute(asked, tmp_path / "run", client), system_load=load)
    assert bool(doubts(results)) is is_doubtful
    assert bool(contention(results)) is (load.others + load.stolen > 0.1)
    if contention(results):
        assert summary.troubles(results)[0] == contention(results)
