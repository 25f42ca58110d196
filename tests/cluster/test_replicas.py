"""A cell on several hosts: no host measures one twice, no more measure it than were asked for, and none are pooled."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.gate.decision import judge, moved_cells
from attnbench.analysis.hosts import of_run
from attnbench.analysis.results import Results, read
from attnbench.analysis.table import load, of_all_hosts, samples, table
from attnbench.cluster.shares import split
from attnbench.commands import terminal
from attnbench.reports import csv, story
from attnbench.reports import hosts as report
from attnbench.storage.events import CellChecked, Plan, WorkerStarted
from attnbench.storage.journal import HOSTS, JOURNAL, copy_journal, events, write
from attnbench.storage.records import BOOT, Status
from tests import journals
from tests.cluster.simulated import NAMES, Machine, SimulatedRay, drive

POINTS = journals.workloads(seq_len=(16, 32, 64))
PLAN = Plan(
    sweep="example",
    workloads=POINTS,
    implementations=NAMES,
    baseline="sdpa",
    metrics=("latency", "peak_memory"),
    budget_s=60.0,
    call_limit_s=5.0,
    timeout_s=30.0,
    memory_limit_bytes=0,
)


def hosts_of_shares(ray: SimulatedRay) -> dict[str, Counter[str]]:
    """For each share how often each host has measured it."""
    found: dict[str, Counter[str]] = {}
    for host, share in ray.measured:
        found.setdefault(share, Counter())[host] += 1
    return found


def old(number: int, **more) -> list[Machine]:
    return [Machine(name=f"old{n}", takes_s=20.0 + n, **more) for n in range(number)]


def test_each_share_is_measured_by_so_many_hosts_of_each_kind_and_twice_by_none(tmp_path, monkeypatch):
    machines = [*old(3), Machine(name="new", kind="new", takes_s=5.0)]
    ray, said = drive(monkeypatch, tmp_path / "run", machines, 2, PLAN)
    found = hosts_of_shares(ray)
    assert len(found) == len(POINTS)
    for counts in found.values():
        assert set(counts.values()) == {1}
        assert counts["new"] == 1
        assert sum(counts[f"old{n}"] for n in range(3)) == 2
    assert "there is 1 host of new: each cell is measured on 1 of these, and not on 2" in said
    assert said[-1].endswith("has finished share " + ray.measured[-1][1] + ": 9 of 9 (3 shares, each on 3 hosts)")
    assert not any("fewer hosts" in line for line in said)


def test_by_default_one_host_of_each_kind_measures_a_share(tmp_path, monkeypatch):
    ray, _ = drive(monkeypatch, tmp_path / "run", old(2), 1, PLAN)
    assert all(counts.total() == 1 for counts in hosts_of_shares(ray).values())
    assert not list((tmp_path / "run" / HOSTS).glob(f"*/{JOURNAL}"))  # each cell is of one host
    shared = read(tmp_path / "run")
    assert set(shared.hosts) == {"old0", "old1"}
    assert "(2 hosts)" in story.answer(shared)[0]
    assert len(story.answer(shared)) > 1  # what the run says by itself follows: no cell is of two hosts
    assert "All hosts together" in story.summary(shared)
    ray, _ = drive(monkeypatch, tmp_path / "mixed", [*old(2), Machine(name="new", kind="new")], 1, PLAN)
    assert all(counts.total() == 2 and counts["new"] == 1 for counts in hosts_of_shares(ray).values())


def test_two_nodes_on_one_host_are_one_host(tmp_path, monkeypatch):
    ray, said = drive(
        monkeypatch, tmp_path / "run", [Machine(name="same"), Machine(name="same", takes_s=13.0)], 2, PLAN
    )
    assert all(counts == {"same": 1} for counts in hosts_of_shares(ray).values())
    assert len(ray.given) == len(POINTS)
    assert any("is measured on 1 of these, and not on 2" in line for line in said)


def test_the_share_of_a_lost_host_goes_to_another_one_of_its_kind_that_has_not_measured_it(tmp_path, monkeypatch):
    machines = [*old(3), Machine(name="new", kind="new")]
    machines[0] = Machine(name="old0", dies_s=30.0)
    ray, said = drive(monkeypatch, tmp_path / "run", machines, 2, PLAN)
    for counts in hosts_of_shares(ray).values():
        assert set(counts.values()) == {1}
        assert sum(number for host, number in counts.items() if host != "new") == 2
    assert any("old0 was lost while it measured this" in line for line in said)
    assert {record.status for record in read(tmp_path / "run").records} == {Status.ok}


def test_a_host_that_comes_back_goes_on_with_what_it_had_begun(tmp_path, monkeypatch):
    machines = [*old(1), Machine(name="away", takes_s=20.0, dies_s=30.0, returns_s=70.0)]
    ray, _ = drive(monkeypatch, tmp_path / "run", machines, 2, PLAN)
    assert all(counts == {"old0": 1, "away": 1} for counts in hosts_of_shares(ray).values())


def test_fewer_hosts_than_asked_for_are_said_and_no_finding(tmp_path, monkeypatch):
    machines = [*old(1), Machine(name="gone", takes_s=20.0, dies_s=30.0)]
    ray, said = drive(monkeypatch, tmp_path / "run", machines, 2, PLAN)
    assert all(counts["old0"] == 1 for counts in hosts_of_shares(ray).values())
    assert any("was measured on fewer hosts than it was to be: 1 of old: gone was lost" in line for line in said)
    assert {record.status for record in read(tmp_path / "run").records} == {Status.ok}
    assert ray.now_s < 300.0


def test_going_on_measures_what_is_missing_alone(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    first, _ = drive(monkeypatch, folder, old(1), 3, PLAN)
    assert len(first.measured) == len(POINTS)
    machines = [*old(3), Machine(name="new", kind="new")]
    again, _ = drive(monkeypatch, folder, machines, 1, PLAN)  # the number is the run's own
    assert not any(host == "old0" for host, _ in again.given)
    found = hosts_of_shares(again)
    assert all(counts == {"old1": 1, "old2": 1, "new": 1} for counts in found.values())
    assert set(read(folder / HOSTS / "old0").num_visits) == {workload.id for workload in POINTS}
    last, _ = drive(monkeypatch, folder, machines, 1, PLAN)
    assert last.given == []


def test_a_run_of_another_version_is_refused_in_words(tmp_path, monkeypatch):
    (tmp_path / "run" / HOSTS).mkdir(parents=True)
    (tmp_path / "run" / HOSTS / "shares.json").write_text("2")
    with pytest.raises(ValueError, match="of another version"):
        drive(monkeypatch, tmp_path / "run", old(1), 1, PLAN)


def test_two_hosts_that_have_begun_one_share_do_not_wait_for_each_other(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shares = split(PLAN, "run", 2.0)
    machines = [Machine(name=f"old{n}", held={share.name: False for share in shares}) for n in range(2)]
    ray, _ = drive(monkeypatch, folder, machines, 1, PLAN)
    assert all(counts.total() == 1 for counts in hosts_of_shares(ray).values())
    assert len(ray.measured) == len(POINTS)


def test_what_fails_on_a_host_is_tried_on_the_others_and_not_for_ever(tmp_path, monkeypatch):
    ray, said = drive(monkeypatch, tmp_path / "run", [*old(2), Machine(name="bad", fails=True)], 2, PLAN)
    assert all(counts == {"old0": 1, "old1": 1} for counts in hosts_of_shares(ray).values())
    ray, said = drive(monkeypatch, tmp_path / "bad", [Machine(name="bad", fails=True)], 1, PLAN)
    assert {record.status for record in read(tmp_path / "bad").records} == {Status.lost}
    assert all(count == 1 for count in Counter(ray.given).values())
    assert any("is lost" in line for line in said)


@pytest.mark.parametrize("kept", [0, 1000, -40])
def test_a_journal_that_did_not_come_whole_does_not_count(tmp_path, monkeypatch, kept):
    """Cut off after the first line, in another one, or in the last."""
    machines = [*old(1), Machine(name="bad", kept=kept)]
    ray, said = drive(monkeypatch, tmp_path / "run", machines, 1, PLAN)
    assert all(counts["old0"] == 1 for counts in hosts_of_shares(ray).values())
    assert {record.status for record in read(tmp_path / "run").records} == {Status.ok}
    assert any("its journal came damaged or unfinished" in line for line in said)


def test_a_long_share_shows_how_far_it_is(tmp_path, monkeypatch):
    _, said = drive(monkeypatch, tmp_path / "run", [Machine(name="slow", takes_s=100.0)], 1, PLAN)
    far = [line for line in said if line.startswith("at work: slow share 0-")]
    assert len(far) == 3
    assert [int(line.removesuffix(" %").rpartition(" ")[2]) for line in far] == pytest.approx([30, 60, 90], abs=12)


@pytest.fixture
def biased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    """A run of which each cell was measured on two hosts that say opposite things, and on one of another kind."""
    machines = [
        Machine(name="a", bias=1.5),
        Machine(name="b", bias=0.4),
        Machine(name="c", kind="new", bias=1.0),
    ]
    drive(monkeypatch, tmp_path / "run", machines, 2, PLAN)
    return read(tmp_path / "run")


def test_no_interval_holds_samples_of_two_hosts(biased: Results):
    cells = load(biased.folder)
    assert not cells.duplicated(["workload", "implementation", "host"]).any()
    assert Counter(cells["host"]) == dict.fromkeys("abc", len(POINTS) * len(NAMES))
    assert set(cells["num_samples"]) == {24}
    ratios = cells[cells["implementation"] == "fused"].groupby("host")["ratio"].mean()
    assert ratios["a"] / ratios["b"] == pytest.approx(1.5 / 0.4, rel=0.05)
    assert ratios["a"] / ratios["c"] == pytest.approx(1.5, rel=0.05)
    assert (cells["ratio_high"] / cells["ratio_low"]).max() < 1.2  # of one host; of both it would be above 3
    raw = samples(biased.folder)
    timed = raw[raw["metric"] == "latency"].groupby(["workload", "implementation", "host"]).size()
    assert set(timed) == {24}
    assert not table(biased).duplicated(["workload", "implementation"]).any()
    assert set(table(biased)["num_samples"]) == {24}


def test_all_hosts_are_in_the_csv_and_one_is_in_the_tables(biased: Results):
    rows = csv.text(biased).splitlines()
    assert len(rows) == 1 + 3 * len(POINTS) * len(NAMES)
    assert len(of_all_hosts(biased)) == len(rows) - 1
    assert {record.host for record in biased.records} == {"a"}


def test_the_report_begins_with_what_hosts_say_together(biased: Results, capsys, monkeypatch):
    found = of_run(biased)
    assert found is not None
    assert found.is_replicated
    assert {tuple(sorted(cell.logs)) for cell in found.cells} == {("a", "b"), ("c",)}
    summary = story.summary(biased)
    assert summary.index("All hosts together") < summary.index("## Cells")
    assert "A: verdict" in summary
    assert "What follows shows one host for each workload: a (3)." in summary
    assert report.FEW in summary
    assert "All hosts together" in story.page(biased)
    monkeypatch.setattr(terminal.VERBOSITY, "is_verbose", True)
    terminal.print_results(biased)
    said = capsys.readouterr().out
    assert said.index("All hosts together") < said.index("Time of a call")
    assert " ".join(story.answer(biased)[0].split()) in " ".join(said.split())
    assert "one host for each workload: a (3)" in " ".join(said.split())
    data = terminal.summary(biased)["hosts"]
    assert len(data["comparisons"]) == 2 * len(POINTS) * (len(NAMES) - 1)


def test_a_copy_of_the_run_says_the_same(biased: Results, tmp_path: Path):
    copy_journal(biased.folder, tmp_path / "copy")
    assert story.answer(read(tmp_path / "copy")) == story.answer(biased)


def test_doubts_about_any_host_are_said(biased: Results):
    path = biased.folder / HOSTS / "b" / JOURNAL
    history = list(events(path))
    other = msgspec.structs.replace(journals.ENVIRONMENT, cpu="another")
    place = next(number for number, each in enumerate(history) if isinstance(each, CellChecked)) + 1
    write(path, [*history[:place], WorkerStarted(time="later", environment=other, host="b"), *history[place:]])
    again = read(biased.folder)
    assert not doubts(again)
    said = story.troubles(again)
    assert any(line.startswith("Host b: The machine changed during this run") for line in said)
    assert any(line.startswith("Host b does not count") for line in said)


def test_the_gate_takes_two_hosts_for_two_machines_and_each_host_can_be_judged_alone(tmp_path, monkeypatch):
    machines = [Machine(name="a"), Machine(name="b")]
    drive(monkeypatch, tmp_path / "before", machines[:1], 1, PLAN)
    drive(monkeypatch, tmp_path / "after", machines[1:], 1, PLAN)
    drive(monkeypatch, tmp_path / "both", machines, 2, PLAN)
    base, other, both = (read(tmp_path / name) for name in ("before", "after", "both"))
    number = len(POINTS) * len(NAMES)
    assert moved_cells(base, other) == [("a", "b")] * number
    assert any("were measured on other hosts than before (a and b)" in note for note in judge(base, other).notes)
    assert not moved_cells(base, both)  # whose tables show the first host
    assert moved_cells(base, read(both.folder / HOSTS / "b")) == [("a", "b")] * number
    assert not any("other hosts" in note for note in judge(base, both).notes)


def test_nodes_of_one_machine_are_named_in_the_report(tmp_path, monkeypatch):
    environment = msgspec.structs.replace(journals.ENVIRONMENT, moment={BOOT: "m1"})
    monkeypatch.setattr(Machine, "environment", environment)
    drive(monkeypatch, tmp_path / "run", old(2), 2, PLAN)
    assert any("old0, old1 are one machine" in line for line in story.troubles(read(tmp_path / "run")))
