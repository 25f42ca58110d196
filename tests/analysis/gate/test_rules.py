"""Rules of the threshold file: their limits, their scope, and the note on a rule that matches nothing."""

import math
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.gate.decision import judge, judge_sides
from attnbench.analysis.gate.rulings import Kind, Outcome, Rule, Thresholds
from attnbench.analysis.results import Results
from attnbench.storage.events import CellMeasured
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS
from tests.analysis.gate import scripts
from tests.analysis.gate.scripts import FIRST, run, scales


@pytest.mark.parametrize("allowed", [0.25, 0.5, math.inf])
def test_more_may_be_allowed_than_had_to_be_seen(base: Results, tmp_path: Path, allowed: float) -> None:
    asked = Thresholds(rule=(Rule(metric="latency", allowed=allowed),))
    decision = judge(base, run(tmp_path / "run", scales("fused", 1.1)), asked)
    assert decision.outcome is Outcome.passed
    assert "4 of 4 times could be judged" in decision.words


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


@pytest.fixture(scope="module")
def a_little_slower(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Slow both cells of `x` by 5 %."""

    def cost_s(workload, name):
        return 1e-4 * workload.seq_len * (1.0 if name.endswith("(base)") else 1.05)

    asked = virtual.with_sides(virtual.plan(2, ("x",), budget_s=120.0, seed=1))
    client = virtual.SimulatedClient(WORLDS["calm"], cost_s, seed=1, layout=0.003, process=0.003)
    return virtual.execute(asked, tmp_path_factory.mktemp("slower") / "run", client)


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        (0.10, 0.10, Outcome.passed),
        (0.10, 0.20, Outcome.passed),
        (0.10, None, Outcome.finding),  # one has no rule
        (0.03, 0.20, Outcome.finding),  # the strictest of the rules
    ],
)
def test_what_rules_allow_to_every_cell_is_allowed_to_the_whole(
    a_little_slower: Results, first: float, second: float | None, outcome: Outcome
) -> None:
    one, other = (workload.id for workload in a_little_slower.plan.workloads)
    given = [(one, first), (other, second)]
    rules = tuple(
        Rule(workload=workload, implementation="x", metric="latency", allowed=allowed)
        for workload, allowed in given
        if allowed is not None
    )
    assert judge_sides(a_little_slower, Thresholds(rule=rules)).suite.outcome is outcome
