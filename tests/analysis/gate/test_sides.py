"""The gate on one session with both sides, and the rule by which an interval and a limit decide about a time."""

import dataclasses
import math
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.gate.decision import judge_sides
from attnbench.analysis.gate.rulings import Kind, Outcome, Rule, Thresholds
from attnbench.analysis.gate.times import LARGEST_MARGIN, decided
from attnbench.analysis.results import Results
from attnbench.statistics.verdict import Effect, Reason, half_widths, judge
from attnbench.storage.records import BASE
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS

NUM_PROCESSES = 9
MARGIN = 0.02


def judged(ratio: float, high: float | None, allowed: float | None) -> tuple[Kind, Reason | None, str]:
    """Judge a ratio over nine processes whose interval ends at `high`, with or without a rule that allows growth."""
    error = None if high is None else math.log(high / ratio) / float(half_widths(1.0, NUM_PROCESSES - 1, 0.05))
    seen = Effect(
        log=math.log(ratio),
        error=error,
        degrees=NUM_PROCESSES - 1,
        num_processes=NUM_PROCESSES,
        num_measured=NUM_PROCESSES,
        num_looks=1,
    )
    margin = MARGIN if allowed is None else min(allowed, LARGEST_MARGIN)
    return decided(judge({"it": seen}, margin)["it"], is_asked=allowed is not None)


@pytest.mark.parametrize(
    ("allowed", "ratio", "high", "kind", "reason"),
    [
        (None, 1.001, 1.01, Kind.same, None),
        (None, 1.001, 1.03, Kind.undecided, Reason.imprecise),
        (None, 1.05, 1.11, Kind.undecided, Reason.imprecise),  # noise never passes, even if a small one would show
        (None, 1.05, 1.06, Kind.slower, None),
        (None, 0.9, 0.92, Kind.faster, None),
        (None, 1.2, None, Kind.undecided, Reason.few_processes),
        (0.0, 1.05, 1.055, Kind.slower, None),
        (0.04, 1.05, 1.055, Kind.slower, None),
        (0.10, 1.05, 1.055, Kind.same, None),
        (math.inf, 1.05, 1.055, Kind.same, None),
        (math.inf, 1.2, 1.7, Kind.same, None),  # undecided, and all that it may be is allowed
        (math.inf, 1.2, None, Kind.same, None),
        (0.4, 1.2, 1.3, Kind.same, None),
        (0.4, 1.2, 1.7, Kind.undecided, Reason.threshold),
        (0.4, 1.2, None, Kind.undecided, Reason.few_processes),
        (0.01, 1.004, 1.018, Kind.undecided, Reason.threshold),  # below what the interval resolves
        (0.01, 1.004, 1.009, Kind.same, None),
        (0.03, 1.004, 1.018, Kind.same, None),
    ],
)
def test_an_interval_and_a_limit_decide_about_a_time(
    allowed: float | None, ratio: float, high: float | None, kind: Kind, reason: Reason | None
) -> None:
    *decision, words = judged(ratio, high, allowed)
    assert decision == [kind, reason]
    assert (f"{100 * (ratio - 1):+.1f} %" in words) is (reason is not Reason.few_processes)


def measured(folder: Path, ratio: float, budget_s: float = 60.0, **changes: float) -> Results:
    """Run a session with two sides in a simulated world; the candidate takes `ratio` times as long."""

    def cost_s(workload, name):
        return 1e-4 * workload.seq_len * (1.0 if name.endswith("(base)") else ratio)

    asked = virtual.with_sides(virtual.plan(2, ("x",), budget_s=budget_s, seed=1))
    asked = msgspec.structs.replace(asked, **{"num_rounds": 4 if budget_s else 3, **changes})
    client = virtual.SimulatedClient(WORLDS["calm"], cost_s, seed=1, layout=0.003, process=0.003)
    return virtual.execute(asked, folder / "run", client)


def rules(allowed: float | None) -> Thresholds:
    return Thresholds(rule=() if allowed is None else (Rule(metric="latency", allowed=allowed),))


@pytest.mark.usefixtures("many_visits")
@pytest.mark.parametrize(
    ("ratio", "budget_s", "outcomes"),
    [
        (1.0, 120.0, {None: Outcome.passed}),
        (1.05, 120.0, {None: Outcome.finding, 0.02: Outcome.finding, 0.10: Outcome.passed}),
        (1.0, 0.0, {None: Outcome.inconclusive}),
    ],
)
def test_a_side_by_side_session_is_judged_as_a_whole(tmp_path, ratio, budget_s, outcomes):
    results = measured(tmp_path, ratio, budget_s)
    for allowed, outcome in outcomes.items():
        decision = judge_sides(results, rules(allowed))
        assert decision.outcome is outcome
        assert (decision.base.run, decision.candidate.run) == ("rev:old", "rev:new")
        assert {ruling.implementation for ruling in decision.rulings} == {"x"}


@pytest.mark.usefixtures("many_visits")
def test_what_processes_differ_by_is_in_the_interval_of_a_session_apart(tmp_path: Path) -> None:
    asked = virtual.with_sides(virtual.plan(1, ("x",), budget_s=120.0, seed=1), is_apart=True)
    client = virtual.SimulatedPair(WORLDS["calm"], lambda *_: 2e-3, seed=1, layout=0.001, process=0.05)
    results = virtual.execute(asked, tmp_path / "run", client)
    (row,) = comparisons(results)
    assert row.high is not None
    decision = judge_sides(results, rules((row.high / row.ratio - 1) / 2))
    assert {ruling.reason for ruling in decision.rulings if ruling.metric == "latency"} == {Reason.threshold}


def test_a_session_that_was_cut_short_is_invalid_whatever_is_missing_from_it(tmp_path: Path) -> None:
    """If killed between the two checks, it seems to have lost the candidate."""
    results = measured(tmp_path, 1.0, 5.0)
    base = tuple(record for record in results.records if record.side == BASE)
    lost = dataclasses.replace(results, records=base)
    assert judge_sides(lost, Thresholds()).outcome is Outcome.finding
    killed = judge_sides(dataclasses.replace(lost, elapsed_s=None), Thresholds())
    assert killed.outcome is Outcome.invalid
    assert killed.words.endswith("go on with attnbench compare rev:old rev:new --resume run")
