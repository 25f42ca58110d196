"""Two runs of one machine in different states: a time that may be due to the state is no finding, and no pass."""

from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.gate.decision import judge
from attnbench.analysis.gate.rulings import Kind, Outcome
from attnbench.analysis.gate.times import state_change
from attnbench.analysis.results import Results
from attnbench.storage.events import CeilingsMeasured, Event
from attnbench.storage.records import Role
from tests.analysis.gate.scripts import NAMES, Change, run, scales
from tests.analysis.gate.test_gate import attnbench


def ceilings(kind: str, factor: float) -> Change:
    """Multiply the time of each load of that kind."""

    def change(event: Event) -> Event:
        if not isinstance(event, CeilingsMeasured):
            return event
        samples = tuple(
            msgspec.structs.replace(sample, value=sample.value * (factor if sample.kind == kind else 1.0))
            for sample in event.ceilings.samples
        )
        return msgspec.structs.replace(event, ceilings=msgspec.structs.replace(event.ceilings, samples=samples))

    return change


def test_a_slowdown_of_a_machine_in_the_same_state_is_a_finding(base: Results, tmp_path: Path) -> None:
    assert state_change(base, base) == ""
    slower = run(tmp_path / "run", scales("fused", 1.3), ceilings("copy", 1.05))
    assert judge(base, slower).outcome is Outcome.finding


@pytest.mark.parametrize("kind", ["matmul", "copy"])
def test_with_a_fallen_ceiling_no_time_is_compared(kind: str, base: Results, tmp_path: Path, monkeypatch) -> None:
    candidate = run(tmp_path / "run", scales("fused", 1.3), ceilings(kind, 1.35))
    decision = judge(base, candidate)
    assert decision.outcome is Outcome.inconclusive
    assert "the runs differ in the state of the machine (compared with the base, the fastest" in decision.words
    assert {one.kind for one in decision.rulings if one.metric == "latency"} == {Kind.undecided}
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder) == 3


def test_what_moves_everything_alike_changes_no_ratio(base: Results, tmp_path: Path) -> None:
    slower = [scales(name, 1.4, role=role) for name in NAMES for role in (Role.measured, Role.control)]
    changes = [*slower, ceilings("matmul", 1.4), ceilings("copy", 1.4)]
    decision = judge(base, run(tmp_path / "worse", *changes, scales("fused", 1.3)))
    assert decision.outcome is Outcome.finding
