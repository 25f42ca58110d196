"""Stored baselines: which runs may become one, the contents of the file, and the choice of the one to compare with."""

from pathlib import Path

import pytest

from attnbench.analysis.conclusion import Ending
from attnbench.analysis.gate import stored
from attnbench.analysis.gate.decision import judge
from attnbench.analysis.results import read
from attnbench.storage.records import Status
from tests.analysis.gate import scripts
from tests.analysis.gate.scripts import ends, run, scales
from tests.analysis.gate.test_gate import attnbench

REASON = "the tiles are larger now"


def accept(results: Path, name: str, reason: str = REASON) -> Path:
    return stored.accept(results / "runs" / name, results, reason)


def baselines(results: Path) -> list[Path]:
    return list((results / "baselines").glob("*"))


def test_a_baseline_is_the_run_with_its_reason_behind_it(tmp_path, monkeypatch):
    before = run(tmp_path / "runs" / "first")
    assert attnbench(monkeypatch, "gate", "first", "--accept", "--results", tmp_path, "--reason", f"  {REASON}\n") == 0
    (path,) = baselines(tmp_path)
    assert path == tmp_path / "baselines" / f"{next(iter(before.environments))}.jsonl"
    found = read(path)
    assert found.records == before.records
    (accepted,) = found.accepted
    assert (accepted.run, accepted.commit, accepted.reason) == ("first", before.started.commit, REASON)
    assert accepted.time > before.started.time
    assert judge(found, before).ending is Ending.passed


def test_a_new_one_takes_the_place_of_the_old_and_keeps_its_reason(tmp_path):
    run(tmp_path / "runs" / "first")
    run(tmp_path / "runs" / "second", scales("fused", 1.3))
    accept(tmp_path, "first", "the first of this machine")
    found = read(accept(tmp_path, "second"))
    assert [(each.run, each.reason) for each in found.accepted] == [
        ("first", "the first of this machine"),
        ("second", REASON),
    ]
    assert found.run == "second"
    again = read(stored.accept(baselines(tmp_path)[0], tmp_path, "the same once more"))
    assert [each.run for each in again.accepted] == ["first", "second", "second"]


def test_a_run_is_held_against_the_baseline_of_its_machine(tmp_path, monkeypatch, capsys):
    run(tmp_path / "runs" / "1_here")
    run(tmp_path / "runs" / "2_there", scripts.elsewhere)
    accept(tmp_path, "1_here")
    accept(tmp_path, "2_there")
    run(tmp_path / "runs" / "3_slow", scales("fused", 1.3))
    assert attnbench(monkeypatch, "gate", "--results", tmp_path) == 1
    assert "base 1_here" in capsys.readouterr().out
    assert attnbench(monkeypatch, "gate", "2_there", "--results", tmp_path) == 0
    assert "base 2_there" in capsys.readouterr().out
    own = stored.path_of(next(iter(read(tmp_path / "runs" / "1_here").environments)), tmp_path)
    assert attnbench(monkeypatch, "gate", own, "3_slow", "--results", tmp_path) == 1


def test_without_one_of_its_own_it_is_held_against_the_newest_and_no_time_counts(tmp_path, monkeypatch, capsys):
    run(tmp_path / "runs" / "here")
    accept(tmp_path, "here")
    run(tmp_path / "runs" / "there", scripts.elsewhere)
    assert attnbench(monkeypatch, "gate", "there", "--results", tmp_path) == 3
    assert "the runs differ in machine or versions" in capsys.readouterr().out


@pytest.mark.parametrize("reason", ["", "   ", "ok", "\n"])
def test_a_reason_is_asked_for(reason, tmp_path):
    run(tmp_path / "runs" / "run")
    with pytest.raises(ValueError, match="is too short"):
        accept(tmp_path, "run", reason)
    assert baselines(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (ends(Status.crashed), "1 of its cells went wrong .fused on .*: crashed"),
        (scripts.killed, "did not finish"),
        (scripts.disturbed, "blocks were discarded"),
    ],
)
def test_a_run_that_went_wrong_becomes_no_baseline(change, reported, tmp_path):
    run(tmp_path / "runs" / "run", change)
    with pytest.raises(ValueError, match=reported):
        accept(tmp_path, "run")
    assert baselines(tmp_path) == []


def test_a_run_of_fewer_processes_than_a_gate_needs_becomes_no_baseline(tmp_path):
    run(tmp_path / "runs" / "run", num_epochs=2)
    with pytest.raises(ValueError, match=r"from 2 processes, .*: give --rounds 4"):
        accept(tmp_path, "run")
    assert baselines(tmp_path) == []
