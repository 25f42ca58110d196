"""The checks of what a sweep over a cluster survives see overlaps, numbers of hosts and other verdicts."""

import shutil
from pathlib import Path

import pytest

from attnbench.analysis.results import read
from attnbench.cluster.host import folder_of_runs
from attnbench.storage.events import ArmSamples, VisitFinished
from attnbench.storage.journal import HOSTS
from attnbench.storage.records import Arm, Sample
from tests.cluster.killing import Trial, overlaps, wrong
from tests.cluster.simulated import Machine, drive
from tests.cluster.test_replicas import PLAN


def visit(start_s: float, length_s: float) -> VisitFinished:
    sample = Sample(value=length_s / 2, num_calls=2, start_s=start_s)
    return VisitFinished(
        workload="w", epoch=0, visit=0, arms=(ArmSamples(arm=Arm(implementation="sdpa"), samples=(sample,)),)
    )


def test_two_hosts_that_measure_at_once_are_seen():
    assert overlaps({"one/0": [visit(0.0, 1.0), visit(2.0, 1.0)], "two/1": [visit(1.0, 1.0)]}) == []
    (found,) = overlaps({"one/0": [visit(0.0, 1.0)], "two/1": [visit(0.9, 1.0)]})
    assert "one/0 and two/1 measured at once" in found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two hosts that have measured each share, with the journals of both where a host keeps them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    drive(monkeypatch, tmp_path / "run", [Machine(name="a"), Machine(name="b")], 2, PLAN)
    shutil.copytree(tmp_path / "run" / HOSTS, folder_of_runs() / "run")
    return tmp_path / "run"


def problems(run: Path, alone: Path, **asked: int) -> list[str]:
    """But for those of time: visits that are made up are all at once."""
    planned = Trial(victim="node", after_s=0.0, **{"hosts_per_cell": 2, "fewest_decided": 1} | asked)
    return [line for line in wrong(run, read(alone), planned) if "at once" not in line]


def test_numbers_of_hosts_and_verdicts_that_are_not_as_asked_are_seen(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drive(monkeypatch, tmp_path / "alone", [Machine(name="a")], 1, PLAN)
    assert problems(run, tmp_path / "alone") == []
    assert (
        len([line for line in problems(run, tmp_path / "alone", hosts_per_cell=1) if "2 hosts, and not by 1" in line])
        == 3
    )
    assert any("comparisons are decided" in line for line in problems(run, tmp_path / "alone", fewest_decided=100))
    drive(monkeypatch, tmp_path / "fast", [Machine(name="a", bias=0.1)], 1, PLAN)
    assert any("slower, and alone faster" in line for line in problems(run, tmp_path / "fast"))


def test_a_share_that_one_host_lacks_is_seen(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drive(monkeypatch, tmp_path / "alone", [Machine(name="a")], 1, PLAN)
    shutil.rmtree(run / HOSTS / "b")
    said = problems(run, tmp_path / "alone")
    assert sum("was measured by 1 hosts, and not by 2" in line for line in said) == 3
