"""The journals of hosts become one run: each share belongs to one host, and each cell was measured by one."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.analysis.table import samples, table
from attnbench.cluster.shares import finished, merge, split
from attnbench.storage.events import DamagedError, Plan, RunStarted, VisitFinished
from attnbench.storage.journal import HOSTS, JOURNAL, events
from attnbench.storage.records import FALSE_SHARE, Status
from tests import journals

NAMES = ("sdpa", "fused")
POINTS = journals.workloads(seq_len=(16, 32, 64, 128, 256))


def host_writes(folder: Path, host: str, share: tuple[str, Plan], **options):
    """Write a made-up journal of a host to the driver's place for it."""
    options |= {"num_epochs": 2, "num_visits": 4, "levels": {"matmul": 2e12 if host == "b" else 1e12}}
    journals.write(folder / HOSTS / host / share[0], share[1].workloads, NAMES, **options)


@pytest.fixture
def run(tmp_path) -> tuple[Path, RunStarted, dict[str, Plan]]:
    plan = journals.write(tmp_path / "plan", POINTS, NAMES, num_visits=1, num_epochs=1).plan
    started = next(events(tmp_path / "plan" / JOURNAL))
    return tmp_path / "run", started, split(plan, 1)


def test_shares_have_each_workload_once_and_the_whole_budget(run):
    plan, names = run[1].plan, set()
    for hosts in (1, 2, 50):
        shares = split(plan, hosts)
        names.add(tuple(shares))
        taken = Counter(workload.id for share in shares.values() for workload in share.workloads)
        assert taken == Counter(workload.id for workload in plan.workloads)
        assert sum(share.budget_s for share in shares.values()) == pytest.approx(60.0 * hosts)
        assert sum(share.false_share for share in shares.values()) == pytest.approx(FALSE_SHARE)
    assert len(names) == 1


def test_what_hosts_have_finished_is_one_run_with_a_host_for_each_cell(run):
    folder, started, shares = run
    for number, share in enumerate(shares.items()):
        host_writes(folder, "ab"[number % 2], share)
    merge(folder, started, shares, {})
    results = read(folder)
    assert results.hosts == ("a", "b")
    assert results.elapsed_s == pytest.approx(119.0 * -(-len(shares) // 2))  # of the slowest host
    host_of = {workload.id: "ab"[n % 2] for n, share in enumerate(shares.values()) for workload in share.workloads}
    assert {record.workload.id: record.host for record in results.records} == host_of
    cells = table(results)
    assert dict(zip(cells["workload"], cells["host"], strict=True)) == host_of
    assert set(samples(folder)["host"]) == {"a", "b"}
    # Each host has its share of the ceilings.
    for record in results.records:
        found = results.ceilings[record.host, record.workload.place].matmul
        assert found is not None
        assert found.rate == pytest.approx(2e12 if record.host == "b" else 1e12, rel=0.1)
    epochs = [each.epoch for each in events(folder / JOURNAL) if isinstance(each, VisitFinished)]
    assert epochs == sorted(epochs)
    before = (folder / JOURNAL).read_bytes()
    merge(folder, started, shares, {})
    assert (folder / JOURNAL).read_bytes() == before


def test_every_visit_of_a_finished_share_is_there_and_none_twice(run):
    folder, started, shares = run
    for share in shares.items():
        host_writes(folder, "a", share)
    first, second = [*shares.items()][:2]
    host_writes(folder, "b", first)  # an actor that was believed lost finished, too
    host_writes(folder, "c", second, is_finished=False)
    merge(folder, started, shares, {})
    results = read(folder)
    assert results.hosts == ("a",)  # the first by name
    assert set(results.num_visits.values()) == {8}
    assert all(len(record.samples("latency")) == 32 for record in results.records if record.status is Status.ok)


def test_a_share_that_is_open_has_no_cells_and_the_run_no_end(run):
    folder, started, shares = run
    (first, plan), second = [*shares.items()][:2]
    host_writes(folder, "a", (first, plan))
    host_writes(folder, "a", second, is_finished=False)
    assert finished(folder, second[0]) is None
    merge(folder, started, shares)
    results = read(folder)
    assert results.elapsed_s is None
    assert {record.workload.id for record in results.records} == {each.id for each in plan.workloads}


def test_what_no_host_could_measure_is_lost_and_a_finding(run):
    folder, started, shares = run
    (first, plan), *others = shares.items()
    for share in others:
        host_writes(folder, "a", share)
    merge(folder, started, shares, {first: "a was lost: no power"})
    lost = [record for record in read(folder).records if record.status is Status.lost]
    assert {record.workload.id for record in lost} == {each.id for each in plan.workloads}
    assert all(record.is_finding and record.message == "a was lost: no power" for record in lost)


def test_hosts_of_two_kinds_are_no_machine_that_changed(run):
    from attnbench.analysis.comparisons import doubts

    folder, started, shares = run
    other = msgspec.structs.replace(journals.ENVIRONMENT, cpu="another")
    for number, share in enumerate(shares.items()):
        host_writes(folder, "ab"[number % 2], share, environment=(journals.ENVIRONMENT, other)[number % 2])
    merge(folder, started, shares, {})
    results = read(folder)
    assert len(results.environments) == 2
    assert not any("changed" in line for line in doubts(results))


def test_a_journal_of_a_host_that_was_changed_is_refused(run):
    folder, started, shares = run
    share = next(iter(shares.items()))
    host_writes(folder, "a", share)
    path = folder / HOSTS / "a" / share[0] / JOURNAL
    path.write_bytes(path.read_bytes().replace(b'"elapsed_s":119', b'"elapsed_s":118'))
    with pytest.raises(DamagedError, match="it was changed"):
        merge(folder, started, shares, {})
