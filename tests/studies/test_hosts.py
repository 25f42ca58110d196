"""The study of many hosts, with few of them: what it counts, what it plants, and what a coordinator costs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from attnbench.storage.records import Verdict
from studies import coordination, hosts
from studies.hosts import CPUS, NAMES, Pair, Session, Size, Truth
from studies.simulated.cluster import NUM_VISITS, hundred

SIZE = Size(num_hosts=10, num_workloads=3, budget_s=150.0, repeats=1)


@pytest.fixture(scope="module")
def session() -> Session:
    return hosts.session(1, SIZE)


def test_a_hundred_hosts_have_what_their_page_says() -> None:
    found = list(hundred(100, CPUS, 600.0, 0))
    first = [host for host in found if not host.name.startswith("new")]
    assert len(first) == 100
    assert [sum(host.cpu == cpu for host in first) for cpu in CPUS] == [50, 50]
    assert sum(host.slowness > 1 for host in first) == 10
    assert sum(host.world in {"drift", "random_walk", "throttling", "busy"} for host in first) == 30
    assert sum(host.layout > 0.01 for host in first) == 2
    assert sorted(int((host.lost_s + 30) // 60) for host in first if host.lost_s < 600) == list(range(1, 10))
    assert all(host.joins_s > 60 for host in found if host not in first)


def test_the_truth_has_winners_that_differ_between_kinds_and_hosts_that_differ_from_one_another() -> None:
    truth = Truth(seed=0, lengths=tuple(range(8, 8 + 60)))
    logs = {cpu: [truth.log(cpu, length, name) for length in truth.lengths for name in NAMES[1:]] for cpu in CPUS}
    assert any(one < 0 < other for one, other in zip(*logs.values(), strict=True))
    assert sum(log == 0 for log in logs[CPUS[0]]) > 20


def test_verdicts_and_throughput_are_counted_against_what_is_known(session: Session) -> None:
    pairs = session.pairs
    assert len(pairs) == len(session.found.cells) == len(CPUS) * 3 * len(NAMES[1:])
    assert 0.5 < session.useful_s / session.capacity_s < 1.0
    assert session.tally.lost
    assert sum(session.tally.num_visits.values()) == sum(
        sum(part.num_visits.values()) for part in session.found.parts.values()
    )
    opposite = sum({pair.many, pair.one} == {Verdict.faster, Verdict.slower} for pair in pairs)
    assert opposite == 0


def test_no_visit_counts_whose_host_was_lost_meanwhile(session: Session) -> None:
    """All that a host did lies before it was lost."""
    for host in session.hosts:
        if host.lost_s < SIZE.budget_s:
            assert session.tally.useful_s[host.name] < host.lost_s - host.joins_s


def test_a_planted_fault_misses_its_limit(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {row["what"][:8]: row[""] for row in hosts.limits([session])}
    assert found["throughp"] in {"met", "MISSED"}
    assert found["false al"] == "met"
    monkeypatch.setattr(hosts, "LEAST_THROUGHPUT", 1.0)
    rows = hosts.limits([session])
    assert [row[""] for row in rows if row["what"].startswith("throughput")] == ["MISSED"]


def verdict_rows(session: Session, many: Sequence[Verdict], other: Sequence[Verdict]) -> list[tuple[str, str]]:
    """What the three limits of verdicts find, where the truth and the long run say equivalent each time."""
    pairs = [
        Pair(many=one_of_many, one=Verdict.equivalent, other=one_of_other, log=0.0, holds=True)
        for one_of_many, one_of_other in zip(many, other, strict=True)
    ]
    return [(row["found"], row[""]) for row in hosts.limits([replace(session, pairs=pairs)])[:3]]


def test_hosts_may_differ_from_a_long_run_as_often_as_another_long_run_does(session: Session) -> None:
    same, open_ = [Verdict.equivalent], [Verdict.undecided]
    few = verdict_rows(session, open_ * 4 + same * 396, same * 400)
    assert [is_met for _, is_met in few] == ["MISSED", "met", "met"]
    assert few[0][0].startswith("396 of 400 (at most 2.9 % differ")
    assert few[1][0].startswith("400 of 400")
    assert few[1][0].endswith("hosts alone differ in 4, it alone in 0: p = 6.2 %")
    many = verdict_rows(session, open_ * 5 + same * 395, same * 400)
    assert [is_met for _, is_met in many] == ["MISSED", "MISSED", "met"]
    both = verdict_rows(session, open_ * 5 + same * 395, same * 5 + open_ * 5 + same * 390)
    assert [is_met for _, is_met in both] == ["MISSED", "met", "met"]
    together = verdict_rows(session, open_ * 5 + same * 395, open_ * 5 + same * 395)
    assert together[1][0].endswith("hosts alone differ in 0, it alone in 0: p = 100 %")


def test_one_verdict_against_the_truth_is_one_too_many(session: Session) -> None:
    rows = verdict_rows(session, [Verdict.slower] + [Verdict.equivalent] * 399, [Verdict.equivalent] * 400)
    assert rows[2] == ("0; 1", "MISSED")


def test_the_page_has_a_row_for_each_limit(session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts, "session", lambda *_: session)
    text = hosts.simulate(tmp_path, SIZE, seed=1)
    assert (tmp_path / "hosts.md").read_text() == text
    assert text.count("| met") + text.count("| MISSED") == 7
    assert "python -m studies.hosts" in text


def test_the_costs_of_a_coordinator_grow_in_straight_lines(tmp_path: Path) -> None:
    text = hosts.coordinator(tmp_path, sizes=(4, 8, 16))
    assert text.index("Nobody has run 1,000 hosts") < text.index("| cost")
    few, many = coordination.measure((4, 16))
    assert (few.num_cells, few.num_visits) == (12, 4 * NUM_VISITS)
    assert many.message_bytes / many.num_visits == pytest.approx(few.message_bytes / few.num_visits, rel=0.05)
    for name in ("at_work_bytes", "read_bytes", "journal_bytes"):
        assert getattr(many, name) / many.num_cells == pytest.approx(getattr(few, name) / few.num_cells, rel=0.5)
    assert coordination.slope([few, many], lambda cost: 7.0 * cost.num_cells + 3) == pytest.approx(7.0)
    assert "Ray 9.9" not in text
    ray = coordination.RayCost(
        version="9.9", start_s=0.5, call_s=1e-3, handed_s=2e-3, fetched_s=3e-3, nodes_s=4e-3, share_bytes=2048,
        journal_bytes=2**20,
    )  # fmt: skip
    said = coordination.page([few, many], ray)
    assert all(each in said for each in ("Ray 9.9", "1.00 ms", "2.00 KiB", "2.00 ms", "1.00 MiB", "3.00 ms", "500 ms"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_what_ray_costs_is_measured_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install attnbench[cluster]")
    monkeypatch.setattr(coordination, "NUM_CALLS", 20)
    found = coordination.over_ray(10_000)
    assert found is not None
    assert min(found.call_s, found.start_s, found.handed_s, found.fetched_s, found.nodes_s, found.share_bytes) > 0
