"""A calibration on a simulated machine: it keeps its time, and times only what was checked; found again and used."""

from typing import Any

import msgspec
import pytest

from attnbench.analysis import calibration
from attnbench.analysis.table import rows, table
from attnbench.commands.dry_run import predicted, sentence
from attnbench.processes.calibrating import COUNTED, NEW_CELLS_SHARE
from attnbench.processes.execution import Predicted
from attnbench.processes.messages import Check, Prepared, Reply, SampleBlocks, Work
from attnbench.storage.events import CellChecked, VisitFinished
from attnbench.storage.journal import JOURNAL, events
from attnbench.storage.records import Arm
from attnbench.workloads.counts import every_pair
from attnbench.workloads.workload import Workload
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS

UNSEEN = Workload(seq_len=336, num_heads=6, mask="none", direction="forward")


def seconds(workload: Workload, name: str) -> float:
    return 1e-5 + {"baseline": 1e-9, "slow": 2e-9}[name] * workload.num_heads * every_pair(workload)


class Noting(virtual.SimulatedClient):
    """Notes which checks and visits it is asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.checks, self.visits = list[Check](), list[SampleBlocks]()

    def ask(self, request: Work) -> Reply:
        if isinstance(request, Check):
            self.checks.append(request)
        if isinstance(request, SampleBlocks):
            self.visits.append(request)
        return super().ask(request)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    base = virtual.plan(1, ("baseline", "slow"), budget_s=1.0)
    plan = calibration.planned(base, (), budget_s=6.0)
    client = Noting(WORLDS["drift"], seconds)
    folder = tmp_path_factory.mktemp("results") / calibration.FOLDER / "one"
    return virtual.execute(plan, folder, client), client


@pytest.fixture(scope="module")
def results(ran):
    return ran[0]


def test_the_first_cell_of_each_kind_is_checked_in_full_and_the_others_briefly(ran):
    checks = ran[1].checks
    kinds = [(request.workload.mask, request.workload.direction, request.arm) for request in checks]
    assert len(checks) > 2 * len(set(kinds))
    assert [request.is_brief for request in checks] == [kind in kinds[:place] for place, kind in enumerate(kinds)]


def test_it_keeps_its_time_and_most_of_it_goes_into_new_cells(results):
    assert 0.5 * NEW_CELLS_SHARE * 6 < results.elapsed_s < 6.5
    assert len(results.records) < results.plan.num_cells


def test_of_what_comes_with_the_harness_one_visit_of_four_is_verified(ran, tmp_path):
    plan = calibration.planned(virtual.plan(1, ("sdpa", "fused"), budget_s=1.0), (), budget_s=2.0)
    client = Noting(WORLDS["calm"], lambda workload, _: seconds(workload, "slow"))
    virtual.execute(plan, tmp_path, client)
    first = [visit.verifies for visit in client.visits if visit.number == 0]
    assert len(first) > 4
    assert first == [place % 4 == 0 for place in range(len(first))]
    assert any(visit.verifies for visit in client.visits if visit.number)
    assert all(visit.verifies for visit in ran[1].visits)  # code from elsewhere


def test_memory_is_counted_at_the_first_workloads_of_each_kind(results):
    by_kind: dict[tuple[str, str], list[bool]] = {}
    for row in rows(table(results)):
        if row["implementation"] == "baseline":
            by_kind.setdefault((row["direction"], row["mask"]), []).append(row["peak_memory_bytes"] is not None)
    assert max(map(len, by_kind.values())) > COUNTED
    assert all(counted == [place < COUNTED for place in range(len(counted))] for counted in by_kind.values())


def test_ceilings_and_all_memory_are_measured_where_they_are_asked_for(results, tmp_path):
    assert not results.ceilings
    asked = msgspec.structs.replace(results.plan, stages=(*calibration.STAGES, "metrics", "ceilings"))
    found = virtual.execute(asked, tmp_path, virtual.SimulatedClient(WORLDS["calm"], seconds))
    assert found.ceilings
    assert all(row["peak_memory_bytes"] is not None for row in rows(table(found)) if row["status"] == "ok")


def test_what_is_timed_was_checked_before(results):
    checked = set()
    for event in events(results.folder / JOURNAL):
        if isinstance(event, CellChecked):
            checked.add(event.key)
        if isinstance(event, VisitFinished):
            arms = [each.arm for each in event.arms if each.arm.implementation in {"baseline", "slow"}]
            assert all((event.workload, Arm(implementation=arm.implementation)) in checked for arm in arms)
    assert {row["num_visits"] >= 1 for row in rows(table(results))} == {True}


def test_it_is_found_by_its_environment_alone(results):
    below, environment = results.folder.parents[1], virtual.ENVIRONMENT
    assert list(calibration.stored(below, environment)) == [results.folder]
    steady = msgspec.structs.replace(environment, settings={"MALLOC_MMAP_THRESHOLD_": "1"})
    assert list(calibration.stored(below, steady)) == [results.folder]
    for other in ({"cpu": "another"}, {"settings": {"OMP_NUM_THREADS": "1"}}):
        assert not list(calibration.stored(below, msgspec.structs.replace(environment, **other)))


def test_what_is_damaged_or_too_little_is_no_calibration(tmp_path):
    damaged, short = (tmp_path / calibration.FOLDER / name for name in ("damaged", "short"))
    damaged.mkdir(parents=True)
    (damaged / JOURNAL).write_text("nonsense\n")
    base = virtual.plan(1, ("baseline", "slow"), budget_s=1.0)
    virtual.execute(
        calibration.planned(base, (), budget_s=0.01), short, virtual.SimulatedClient(WORLDS["calm"], seconds)
    )
    assert list(calibration.stored(tmp_path, virtual.ENVIRONMENT)) == [short]
    assert calibration.known(tmp_path, virtual.ENVIRONMENT) is None


def test_a_dry_run_takes_it_where_it_knows_such_cells(results):
    plan = msgspec.structs.replace(results.plan, workloads=(UNSEEN,), stages=())
    reply = Prepared(has_dropout=False, executed_flops=None, call_s=0.1)
    seen = [Predicted(UNSEEN, Arm(implementation=name), reply) for name in ("baseline", "stranger")]
    found = predicted(plan, seen, calibration.known(results.folder.parents[1], virtual.ENVIRONMENT))
    known, stranger = found["predicted"]
    assert known["call_s"] == pytest.approx(seconds(UNSEEN, "baseline"), rel=0.1)
    assert known["call_low_s"] < known["call_s"] < known["call_high_s"]
    assert (stranger["call_s"], stranger["call_low_s"]) == (0.1, None)
    assert "1 times have 90 % intervals" in sentence(found)
    assert "intervals" not in sentence(predicted(plan, seen))
