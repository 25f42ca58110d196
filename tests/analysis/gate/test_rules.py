"""Rules of the threshold file: their limits, their scope, and the note on a rule that matches nothing."""

import math
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.gate.decision import judge
from attnbench.analysis.gate.rulings import Kind, Outcome, Rule, Thresholds
from attnbench.analysis.results import Results
from attnbench.storage.events import CellMeasured
from tests.analysis.gate import scripts
from tests.analysis.gate.scripts import FIRST, run, scales


def test_any_growth_passes_where_a_rule_allows_it(base: Results, tmp_path: Path) -> None:
    asked = Thresholds(rule=(Rule(metric="latency", allowed=math.inf),))
    for name, change in (("noisy", scripts.shaken), ("slow", scales("fused", 3.0))):
        decision = judge(base, run(tmp_path / name, change), asked)
        timed = [
            ruling for ruling in (*decision.rulings, decision.suite) if ruling.effect and ruling.metric == "latency"
        ]
        assert decision.outcome is Outcome.passed
        assert len(timed) == 5
        assert all(ruling.words.endswith("any growth is allowed") for ruling in timed)


@pytest.mark.parametrize("allowed", [0.01, 1.0, math.inf])
def test_what_is_plainly_faster_is_so_whatever_a_rule_allows(base: Results, tmp_path: Path, allowed: float) -> None:
    """It was not checked on the first workload."""
    asked = Thresholds(rule=(Rule(metric="latency", allowed=allowed),))
    decision = judge(base, run(tmp_path / "run", scales("fused", 0.4), scripts.checks(lambda _: None)), asked)
    found = [ruling for ruling in decision.rulings if (ruling.implementation, ruling.metric) == ("fused", "latency")]
    assert {ruling.workload: ruling.kind for ruling in found} == {
        FIRST: Kind.suspicious,
        scripts.POINTS[1].id: Kind.faster,
    }


def test_what_another_machine_may_differ_by_is_not_called_faster(base: Results, tmp_path: Path) -> None:
    decision = judge(base, run(tmp_path / "run", scripts.elsewhere, scales("fused", 0.85)))
    assert decision.outcome is Outcome.passed


@pytest.mark.parametrize(("allowed", "outcome"), [(0.3, Outcome.passed), (None, Outcome.finding)])
def test_what_is_allowed_to_every_cell_is_allowed_to_the_suite(
    tmp_path: Path, allowed: float | None, outcome: Outcome
) -> None:
    before, after = (
        run(tmp_path / name, *changes, names=("sdpa", "fused"))
        for name, changes in (("before", ()), ("after", [scales("fused", 1.1)]))
    )
    rules = () if allowed is None else (Rule(implementation="fused", metric="latency", allowed=allowed),)
    decision = judge(before, after, Thresholds(rule=rules))
    assert (decision.suite.outcome, decision.outcome) == (outcome, outcome)


@pytest.mark.parametrize(
    ("metric", "reported"),
    [
        ("peak_mem", "did you mean peak_memory?"),
        ("time", "choose among error_ratio, executed_flops, latency, num_operators, peak_memory"),
        ("latency_control", "there is no metric latency_control"),
        ("peak_*", ""),
        ("executed_flops", ""),
        ("saved_memory", ""),
    ],
)
def test_a_rule_for_a_metric_that_nobody_knows_is_reported(tmp_path: Path, metric: str, reported: str) -> None:
    def saved(event):
        if isinstance(event, CellMeasured) and event.workload == FIRST:
            return msgspec.structs.replace(
                event, measurement=msgspec.structs.replace(event.measurement, metric="saved_memory")
            )
        return event

    before, after = (run(tmp_path / name, saved) for name in ("before", "after"))
    measured, *notes = judge(before, after, Thresholds(rule=(Rule(metric=metric, allowed=0.5),))).notes
    assert "16 processes" in measured
    assert len(notes) == bool(reported)
    assert all(note.startswith("rule 1 covers nothing here") and reported in note for note in notes)
