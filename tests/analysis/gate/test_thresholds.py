"""Threshold files: their syntax, the rule that applies, and the message for unknown entries."""

import pytest

from attnbench.analysis.gate import rulings
from attnbench.analysis.gate.rulings import Rule, Thresholds, load, parse

TEXT = """
[gate]
see = 0.1

[[gate.rule]]
metric = "latency"
allowed = 0.1

[[gate.rule]]
workload = "*-causal"
implementation = "fused"
metric = "latency"
allowed = 0.3
"""


def test_the_last_rule_that_covers_counts():
    found = parse(TEXT.encode())
    assert found.see == 0.1
    assert found.allowed("t128", "fused", "latency") == 0.1
    assert found.allowed("t128-causal", "fused", "latency") == 0.3
    assert found.allowed("t128-causal", "bmm", "latency") == 0.1


def test_without_a_rule_the_defaults_hold():
    for metric, share in rulings.ALLOWED.items():
        assert Thresholds().allowed("w", "i", metric) == share
        assert Thresholds().limit([("w", "i")], metric) is None
    assert Thresholds().allowed("w", "i", "executed_flops") == 0.0
    assert Thresholds(rule=(Rule(allowed=0.05),)).limit([("w", "i")], "latency") == 0.05


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[gate]\nsea = 1", r"unknown field `sea` - at `\$.gate`; give a TOML file with a table \[gate\] \(rule, see"),
        ("[gat]\nsee = 1", "unknown field `gat`"),
        ("[[gate.rule]]\nallow = 1", "unknown field `allow`.* rules \\(allowed, workload"),
        ("[[gate.rule]]\nmetric = 'latency'", "allowed"),
        ("[[gate.rule]]\nallowed = -0.1", "allowed=-0.1 is not allowed: give a share 0 or more"),
        ("[[gate.rule]]\nallowed = nan", "is not allowed"),
        ("[gate]\nbetween_runs = 50", "between_runs=50.* from 0 to 1"),
        ("[gate]\nsee = 'much'", "see"),
        ("[gate\n", "line 1"),
    ],
)
def test_what_cannot_be_is_refused(text, reported, tmp_path):
    file = tmp_path / "t.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=reported) as caught:
        load(file)
    assert str(file) in str(caught.value)


def test_the_tool_file_is_read_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(None) == Thresholds()
    (tmp_path / "attnbench.toml").write_text(TEXT)
    assert load(None).see == 0.1
    with pytest.raises(ValueError, match=r"cannot read .*absent\.toml: .*; give a TOML file"):
        load(tmp_path / "absent.toml")


def test_everything_may_be_allowed():
    assert parse(b"[[gate.rule]]\nallowed = inf").allowed("w", "i", "num_operators") == float("inf")


@pytest.mark.parametrize(
    ("cells", "least"),
    [
        ([("t128", "fused")], 0.1),
        ([("t128", "fused"), ("t128-causal", "fused")], 0.1),
        ([("t128-causal", "fused")], 0.3),
        ([], None),
    ],
)
def test_several_cells_may_grow_by_the_least_that_is_allowed_to_any(cells, least):
    assert parse(TEXT.encode()).limit(cells, "latency") == least


def test_nothing_is_asked_of_cells_of_which_one_has_no_rule():
    rules = Thresholds(rule=(Rule(implementation="fused", allowed=0.3),))
    assert rules.limit([("t128", "fused"), ("t128", "bmm")], "latency") is None
