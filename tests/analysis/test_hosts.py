"""Runs of one plan on several hosts, simulated: put together by kind, kept apart between kinds, and shown so."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.hosts import CHANGED, Across, Hosts, kind_of, of_run, together
from attnbench.analysis.results import Results, read
from attnbench.reports import hosts as report
from attnbench.reports import story
from attnbench.storage.events import WorkerStarted
from attnbench.storage.journal import JOURNAL, write
from attnbench.storage.journal import events as events_of
from attnbench.storage.records import Verdict
from attnbench.workloads.workload import Workload
from studies.simulated.cluster import SimulatedHost, Tally, sweep
from studies.simulated.virtual import ENVIRONMENT, plan

NAMES = ("baseline", "rival", "same")
OLD, NEW = "Old CPU", "New CPU"
NUM_HOSTS = 6
HOSTS = (
    *(SimulatedHost(name=f"old{number}", cpu=OLD) for number in range(NUM_HOSTS)),
    *(SimulatedHost(name=f"new{number}", cpu=NEW, world="drift") for number in range(NUM_HOSTS)),
)
SLOWER_BY = {OLD: 1.25, NEW: 0.8}
"""What the rival takes, relative to the baseline: it wins on the new processor alone."""
PLAN = plan(2, NAMES, budget_s=20.0)


def sampled(folder: Path, hosts: tuple[SimulatedHost, ...] = HOSTS, seed: int = 0) -> Tally:
    """Each host measures both workloads: no more are asked for than it has at a time."""

    def of(cpu: str, name: str) -> float:
        return 4e-3 * (SLOWER_BY[cpu] if name == "rival" else 1.0)

    def seconds(host: SimulatedHost):
        return lambda _, name: of(host.cpu, name)

    return sweep(hosts, PLAN, {host.name: seconds(host) for host in hosts}, folder, seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run whose hosts have journals of their own."""
    path = tmp_path_factory.mktemp("run")
    sampled(path / "hosts")
    (path / JOURNAL).write_bytes((path / "hosts" / "old0" / JOURNAL).read_bytes())
    return path


@pytest.fixture(scope="module")
def parts(folder: Path) -> Mapping[str, Results]:
    return {host.name: read(folder / "hosts" / host.name) for host in HOSTS}


@pytest.fixture(scope="module")
def found(parts: Mapping[str, Results]) -> Hosts:
    return together(parts)


def verdicts(found: Hosts) -> dict[tuple[str, str], set[Verdict]]:
    """By processor and implementation."""
    seen: dict[tuple[str, str], set[Verdict]] = {}
    for cell in found.cells:
        cpu = OLD if OLD in cell.kind else NEW
        seen.setdefault((cpu, cell.arm.implementation), set()).add(cell.verdict)
    return seen


def test_each_kind_of_host_has_verdicts_of_its_own(found: Hosts) -> None:
    assert verdicts(found) == {
        (OLD, "rival"): {Verdict.slower},
        (NEW, "rival"): {Verdict.faster},
        (OLD, "same"): {Verdict.equivalent},
        (NEW, "same"): {Verdict.equivalent},
    }
    for cell in found.cells:
        truth = SLOWER_BY[OLD if OLD in cell.kind else NEW] if cell.arm.implementation == "rival" else 1.0
        assert cell.judgement.ratio == pytest.approx(truth, rel=0.01)
        assert cell.is_general
        assert len(cell.logs) == cell.judgement.effect.num_processes == NUM_HOSTS


def test_what_wins_on_one_kind_and_loses_on_another_is_named(found: Hosts) -> None:
    assert {arm.implementation for _, arm in found.opposed} == {"rival"}
    assert len(found.opposed) == len(PLAN.workloads)
    kinds = {kind.partition(",")[0]: kind for kind in found.kinds}
    assert {each.fastest for each in found.answers[kinds[OLD]]} == {"baseline"}
    assert {each.fastest for each in found.answers[kinds[NEW]]} == {"rival"}
    said = report.sentences(found)
    assert f"{kinds[NEW]} ({NUM_HOSTS} hosts): of 2 workloads, rival is the fastest on 2." in said
    assert any("slower on Old CPU" in line and "faster on New CPU" in line for line in said)


def test_fewer_than_four_hosts_speak_for_one_alone(parts: Mapping[str, Results]) -> None:
    few = together({name: parts[name] for name in ("old0", "old1", "old2")})
    for cell in few.cells:
        assert not cell.is_general
        assert len(cell.logs) == 3
        assert cell.judgement.effect.num_measured in {len(set(_epochs(parts[name], cell))) for name in cell.logs}
    assert report.FEW in report.lines(parts["old0"]) or report.FEW in report.text(few)


def _epochs(part: Results, cell: Across) -> list[int]:
    records = (each for each in part.records if (each.workload, each.arm) == (cell.workload, cell.arm))
    return [sample.epoch for record in records for sample in record.samples("latency")]


def test_hosts_md_has_a_column_for_each_kind_the_spread_and_who_does_not_count(found: Hosts) -> None:
    text = report.text(found)
    assert "A: verdict" in text
    assert "B: hosts differ by" in text
    assert f"{NUM_HOSTS} hosts: 1.2" in text  # the lowest and the highest ratio of any
    assert report.FEW not in text


def test_a_run_with_journals_of_several_hosts_shows_them_and_one_without_does_not(folder: Path) -> None:
    results, alone = read(folder), read(folder / "hosts" / "old0")
    assert of_run(alone) is None
    assert report.document(alone) == ""
    assert f"({NUM_HOSTS} hosts)" in report.document(results)
    assert any("New CPU" in line for line in story.answer(results))
    assert not any("CPU" in line for line in story.answer(alone))


def test_the_cells_of_a_run_may_be_of_several_hosts(parts: Mapping[str, Results], tmp_path: Path) -> None:
    """As where each workload was measured on one of them, and their journals became one."""
    named = [
        msgspec.structs.replace(record, host=name)
        for name, place in (("old0", 0), ("new0", 1))
        for record in parts[name].records
        if record.workload == PLAN.workloads[place]
    ]
    found = of_run(replace(parts["old0"], records=tuple(named), folder=tmp_path))
    assert found is not None
    assert [len(names) for names in found.kinds.values()] == [1, 1]
    said = {
        (cell.kind[:3], cell.workload.id): cell.verdict for cell in found.cells if cell.arm.implementation == "rival"
    }
    ids = [workload.id for workload in PLAN.workloads]
    assert said == {("Old", ids[0]): Verdict.slower, ("New", ids[1]): Verdict.faster}
    assert not any(cell.is_general for cell in found.cells)


def test_hosts_of_one_kind_leave_the_answer_as_it_is(parts: Mapping[str, Results], tmp_path: Path) -> None:
    records = tuple(msgspec.structs.replace(record, host="old0") for record in parts["old0"].records)
    one = replace(parts["old0"], records=records, folder=tmp_path)
    assert story.answer(one) == story.answer(parts["old0"])
    assert report.document(one)


def test_two_hosts_say_that_they_speak_for_themselves_alone(parts: Mapping[str, Results]) -> None:
    few = together({name: parts[name] for name in ("old0", "old1")})
    assert {cell.verdict for cell in few.cells if cell.arm.implementation == "rival"} == {Verdict.slower}
    assert not any(cell.is_general for cell in few.cells)
    assert report.FEW in report.text(few)
    assert "unknown (2 hosts)" in report.text(few)


def test_a_host_whose_machine_changed_does_not_count(parts: Mapping[str, Results], tmp_path: Path) -> None:
    events = list(events_of(parts["old2"].folder / JOURNAL))
    other = msgspec.structs.replace(ENVIRONMENT, cpu="Another CPU")
    place = next(number for number, each in enumerate(events) if isinstance(each, WorkerStarted)) + 1
    events[place:place] = [WorkerStarted(time="later", environment=other)]
    first_check = place + 1 + len(NAMES)
    events[first_check:first_check] = [msgspec.structs.replace(events[place - 1])]
    (tmp_path / "old2").mkdir()
    write(tmp_path / "old2" / JOURNAL, events)
    changed = {"old0": parts["old0"], "old1": parts["old1"], "old2": read(tmp_path / "old2")}
    assert together(changed).failed == {"old2": CHANGED}


def test_runs_by_other_rules_are_not_put_together(parts: Mapping[str, Results], tmp_path: Path) -> None:
    events = list(events_of(parts["old1"].folder / JOURNAL))
    events[0] = msgspec.structs.replace(events[0], plan=msgspec.structs.replace(PLAN, smallest_effect=0.05))
    (tmp_path / "old1").mkdir()
    write(tmp_path / "old1" / JOURNAL, events)
    with pytest.raises(ValueError, match="old0 and other were measured by other rules"):
        together({"old0": parts["old0"], "other": read(tmp_path / "old1")})
    with pytest.raises(ValueError, match="no host has a run"):
        together({})


def test_the_kind_of_a_host_is_its_model_and_not_its_memory() -> None:
    replace = msgspec.structs.replace
    assert kind_of(replace(ENVIRONMENT, memory_bytes=2**34, system="another")) == kind_of(ENVIRONMENT)
    for other in ({"cpu": "other"}, {"accelerator": "GPU"}, {"num_physical_cores": 8}, {"versions": {"torch": "2"}}):
        assert kind_of(replace(ENVIRONMENT, **other)) != kind_of(ENVIRONMENT)


def test_what_a_lost_host_had_finished_counts_and_the_rest_is_made_elsewhere(tmp_path: Path) -> None:
    """Of six workloads, hosts have three at a time: those of the one that is lost are leased again."""
    lost = SimulatedHost(name="lost", cpu=OLD, lost_s=6.0)
    hosts = (lost, *(SimulatedHost(name=f"old{number}", cpu=OLD) for number in range(2)))
    asked = msgspec.structs.replace(plan(6, NAMES, budget_s=60.0), seed=1)
    tally = sweep(hosts, asked, {host.name: lambda *_: 20e-3 for host in hosts}, tmp_path)
    assert tally.lost == ["lost"]
    assert 0 < tally.num_visits["lost"] < 36
    parts = {host.name: read(tmp_path / host.name) for host in hosts}
    assert sum(parts["lost"].num_visits.values()) == tally.num_visits["lost"]
    assert parts["lost"].elapsed_s is None  # it never came to its end
    visits = {workload.id: 0 for workload in asked.workloads}
    for part in parts.values():
        for workload, number in part.num_visits.items():
            visits[workload] += number
    assert min(visits.values()) >= 12
    assert all(isinstance(workload, Workload) for workload in asked.workloads)
    assert all(math.isfinite(each) for each in tally.useful_s.values())
