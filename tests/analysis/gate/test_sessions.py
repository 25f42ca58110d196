"""`attnbench gate` on a session of two sides, and commands that are passed such a session by mistake: exit codes."""

import shutil
from pathlib import Path

import msgspec
import pytest

from attnbench.storage.events import CellChecked, Plan
from attnbench.storage.records import CANDIDATE, Status
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS
from tests.analysis.gate import scripts
from tests.analysis.gate.test_gate import attnbench

NAME = "session"


def measure(folder: Path, asked: Plan, slowdown: float = 0.0) -> Path:
    """Run a session in `folder`; the candidate is slower by `slowdown`."""

    def cost_s(workload, name):
        return 1e-4 * workload.seq_len * (1.0 if name.endswith("(base)") else 1.0 + slowdown)

    client = virtual.SimulatedClient(WORLDS["calm"], cost_s, seed=1, layout=0.003, process=0.003)
    return virtual.execute(asked, folder, client).folder


def planned(*names: str, budget_s: float = 120.0) -> Plan:
    return virtual.with_sides(virtual.plan(2, names, budget_s=budget_s, seed=1))


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(tmp_path_factory.mktemp("unchanged") / NAME, planned("x"))


@pytest.fixture
def session(unchanged: Path, tmp_path: Path) -> Path:
    """Copy the session without a change, as the newest run below tmp_path."""
    return shutil.copytree(unchanged, tmp_path / "runs" / NAME)


def test_the_same_code_on_both_sides_passes(session: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    assert attnbench(monkeypatch, "gate", "--results", tmp_path, "--to", tmp_path / "gate") == 0
    assert "base rev:old, candidate rev:new" in capsys.readouterr().out
    assert (tmp_path / "gate" / "gate.md").read_text().startswith("## attnbench gate: pass")
    assert attnbench(monkeypatch, "gate", NAME, "--results", tmp_path) == 0


def test_an_implementation_that_only_the_base_has_is_a_finding(tmp_path: Path, monkeypatch, capsys) -> None:
    asked = planned("x", "y", budget_s=0.0)
    assert asked.sides is not None
    candidate = msgspec.structs.replace(asked.sides.candidate, implementations={"x": "x"})
    sides = msgspec.structs.replace(asked.sides, candidate=candidate, lost={"y": "cannot read y.py"})
    measure(tmp_path / "runs" / NAME, msgspec.structs.replace(asked, sides=sides))
    assert attnbench(monkeypatch, "gate", "--results", tmp_path) == 1
    printed = capsys.readouterr().out
    assert "y is gone: cannot read y.py" in printed
    assert printed.splitlines()[-1] == "fail: 2 lost"


@pytest.mark.parametrize("status", [Status.disagrees, Status.unsupported])
def test_a_candidate_that_is_wrong_or_no_longer_supported_is_a_finding(
    session: Path, tmp_path: Path, monkeypatch, status: Status
) -> None:
    def change(event):
        is_candidate = isinstance(event, CellChecked) and event.side == CANDIDATE
        return msgspec.structs.replace(event, status=status, agreement=None) if is_candidate else event

    scripts.rewrite(session, change)
    assert attnbench(monkeypatch, "gate", "--results", tmp_path) == 1


def test_a_session_is_none_of_two_runs(session: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    one = scripts.run(tmp_path / "one").folder
    for pair in ((one, session), (session, one)):
        assert attnbench(monkeypatch, "gate", *pair) == 2
        reported = f"{NAME} compared two sides, and is judged by itself and against no other run: give it alone"
        assert reported in capsys.readouterr().err


def test_a_session_becomes_no_baseline(session: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    reason = ("--reason", "this would be both states at once")
    assert attnbench(monkeypatch, "gate", "--accept", "--results", tmp_path, *reason) == 2
    assert f"{NAME} cannot become a baseline: it compared two sides" in capsys.readouterr().err
    assert not (tmp_path / "baselines").exists()
