"""Rules of the threshold file: syntax, the rule that applies, its effect, and the note on one that matches nothing."""

import math
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.gate.decision import judge
from attnbench.analysis.gate.rulings import ALLOWED, Rule, Thresholds, load
from attnbench.storage.events import CellMeasured
from tests.analysis.gate.scripts import FIRST, run

TEXT = """
[[gate.rule]]
metric = "latency"
allowed = 0.1

[[gate.rule]]
workload = "*-causal"
implementation = "fused"
metric = "latency"
allowed = 0.3
"""
PLAIN, CAUSAL = ("t128", "fused"), ("t128-causal", "fused")


def written(folder: Path, text: str) -> Path:
    (folder / "attnbench.toml").write_text(text)
    return folder / "attnbench.toml"


def test_the_last_rule_that_covers_counts_and_several_cells_may_grow_by_the_least(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(None) == Thresholds()
    found = load(written(tmp_path, TEXT))
    assert found == load(None)
    assert (found.allowed(PLAIN, "latency"), found.allowed(CAUSAL, "latency")) == (0.1, 0.3)
    assert found.allowed(("t128-causal", "bmm"), "latency") == 0.1
    assert found.limit([PLAIN, CAUSAL], "latency") == 0.1
    assert found.limit([], "latency") is None
    assert Thresholds(rule=(Rule(implementation="fused", allowed=0.3),)).limit([PLAIN, ("w", "bmm")], "latency") is None


def test_without_a_rule_the_defaults_hold_and_infinite_growth_may_be_allowed(tmp_path):
    for metric, share in ALLOWED.items():
        assert Thresholds().allowed(PLAIN, metric) == share
    assert Thresholds().allowed(PLAIN, "executed_flops") == 0.0
    everything = load(written(tmp_path, "[[gate.rule]]\nallowed = inf"))
    assert everything.allowed(PLAIN, "num_operators") == math.inf


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[gate]\nsea = 1", r"unknown field `sea`.*; give a TOML file with a table \[gate\]"),
        ("[[gate.rule]]\nallow = 1", "unknown field `allow`.* rules \\(allowed, workload"),
        ("[[gate.rule]]\nmetric = 'latency'", "allowed"),
        ("[[gate.rule]]\nallowed = -0.1", "allowed"),
        ("[[gate.rule]]\nallowed = nan", "allowed"),
        ("[gate\n", "line 1"),
    ],
)
def test_what_cannot_be_is_refused(text, reported, tmp_path):
    with pytest.raises(ValueError, match=reported) as caught:
        load(written(tmp_path, text))
    assert "attnbench.toml" in str(caught.value)
    with pytest.raises(ValueError, match=r"cannot read .*absent\.toml: .*; give a TOML file"):
        load(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("names", "is_reported"),
    [
        ({"metric": "peak_mem"}, True),
        ({"metric": "latency_control"}, True),
        ({"implementation": "fusd"}, True),
        ({"metric": "peak_*"}, False),
        ({"metric": "saved_memory"}, False),
    ],
)
def test_a_rule_that_covers_nothing_is_reported(tmp_path: Path, names: dict[str, str], *, is_reported: bool) -> None:
    def saved(event):
        if isinstance(event, CellMeasured) and event.workload == FIRST:
            return msgspec.structs.replace(
                event, measurement=msgspec.structs.replace(event.measurement, metric="saved_memory")
            )
        return event

    both = [run(tmp_path / name, saved) for name in ("before", "after")]
    measured, *notes = judge(*both, Thresholds(rule=(Rule(allowed=0.5, **names),))).notes
    assert "16 processes" in measured
    assert len(notes) == is_reported
    assert all(note.startswith("rule 1 (") and "peak_memory" in note for note in notes)
