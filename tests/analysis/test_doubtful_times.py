"""Times that other work on the machine may have changed: stored with the visit, and reported first."""

from dataclasses import replace

import msgspec

from attnbench.analysis.comparisons import doubts
from attnbench.reports import story
from attnbench.storage.events import ArmSamples, Event, VisitFinished
from attnbench.storage.fold import State
from attnbench.storage.records import Arm, Sample
from tests import journals

OTHER, MINE = Arm(implementation="sdpa"), Arm(implementation="mine")


def visit(number: int, doubt: str, arms=(OTHER, MINE)) -> VisitFinished:
    taken = tuple(ArmSamples(arm=arm, samples=(Sample(1e-3),)) for arm in arms)
    doubts = {"mine": doubt} if doubt else {}
    return VisitFinished(workload="w", epoch=0, visit=number, arms=taken, doubts=doubts)


def test_the_last_visit_of_a_cell_decides_whether_its_time_is_doubtful():
    timed = State()
    timed.apply(visit(0, "late"))
    timed.apply(visit(1, "", (OTHER,)))
    assert timed.doubts == {("w", MINE): "late"}
    timed.apply(visit(2, ""))
    assert not timed.doubts


def test_a_doubt_survives_the_journal_and_older_journals_have_none():
    stored = msgspec.json.encode(visit(0, "late"))
    assert msgspec.json.decode(stored, type=Event).doubts == {"mine": "late"}
    older = {name: value for name, value in msgspec.json.decode(stored).items() if name != "doubts"}
    older["arms"][0]["samples"][0] = older["arms"][0]["samples"][0][:11]  # before untimed calls were recorded
    read = msgspec.json.decode(msgspec.json.encode(older), type=Event)
    assert not read.doubts
    assert read.arms[0].samples[0].untimed_s == 0.0


def test_a_doubt_is_said_before_any_verdict_once_for_each_implementation(tmp_path):
    points = journals.workloads(seq_len=(256, 512))
    results = journals.write(tmp_path / "run", points, ("fused", "sdpa"), num_epochs=1, num_visits=1)
    fused = Arm(implementation="fused")
    doubtful = replace(results, doubts={(point.id, fused): "clocks differ" for point in points})
    (line,) = [each for each in doubts(doubtful) if "clocks differ" in each]
    assert "fused" in line
    assert line in story.troubles(doubtful)
    assert not any("clocks differ" in each for each in doubts(results))
