"""`attnbench explain` knows every name that a screen or JSON can show, and no other."""

import json
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import attnbench
from attnbench.analysis.conclusion import Ending, Mark
from attnbench.analysis.gate.rulings import Kind
from attnbench.analysis.warned import Warn
from attnbench.checking import diagnosis, dropout, page_rules, rules, side_effects
from attnbench.checking.backward_mistakes import backward_catalogue
from attnbench.checking.mistakes import catalogue
from attnbench.checking.probes import PROBES
from attnbench.cli import app
from attnbench.explained import KINDS, explained, explanations
from attnbench.reports import verdict
from attnbench.statistics.break_even import Payoff
from attnbench.statistics.verdict import Reason
from attnbench.storage.records import CONVENTIONS, EMPTY_ROWS, HIDDEN_NAN, CheckVerdict, Status, Verdict
from attnbench.workloads import sweep
from attnbench.workloads.workload import Workload

HARNESS = Path(attnbench.__file__).parent
MORE = (
    Workload(seq_len=8, num_heads=2, head_dim=8, sinks="learned", direction="forward_backward"),
    Workload(batch_size=3, seq_len=8, num_heads=2, head_dim=8, mask="relative_buckets(4,8)"),
    Workload(batch_size=2, seq_len=8, num_heads=2, head_dim=8, mask="causal+padding(8,5)"),
    Workload(seq_len=8, num_heads=2, head_dim=8, mask="causal+softcap(20)", direction="forward_backward"),
    Workload(seq_len=8, num_heads=2, head_dim=8, value_dim=12),
    Workload(seq_len=8, num_heads=2, head_dim=8, rotary="interleaved"),
    Workload(batch_size=3, seq_len=20, num_heads=6, num_kv_heads=2, head_dim=8, mask="causal+alibi+softcap(3)"),
    Workload(batch_size=3, seq_len=20, kv_len=40, num_heads=3, head_dim=8, mask="causal+padding"),
    Workload(batch="2q4kv40", page_size=16, shared_prefix=32, num_heads=2, head_dim=8, cache_dtype="float8_e5m2"),
    Workload(batch="2q4kv40", page_size=16, mask="sliding_window(9)", num_heads=2, head_dim=8),
)
"""Workloads with features that the sweep `check` has nowhere, or with few others."""
CONDUCT = (side_effects.INPUTS, side_effects.MASK, side_effects.SEED)
OF_PAGES = (page_rules.ANOTHER_BATCH, page_rules.POOLS)
NAMED_BY_DIAGNOSIS = {"features_scaled", "gradient_of_query_unwritten", "output_factor", "output_zero"}
NAMED_BY_DIAGNOSIS |= {"race", "key_gradient_factor", "out_gradient_zero", "scores_scaled", "mask_of_its_own"}
NAMED_BY_DIAGNOSIS |= {*diagnosis.RANDOM, *diagnosis.RULE_MISTAKES.values(), diagnosis.FLOAT32_INSIDE}
NAMED_BY_DIAGNOSIS |= {"unused_nan"}
NAMED_BY_DIAGNOSIS |= {f"{name}_where_nothing_is_seen" for name in ("nan", "mean", "all")}


def shown() -> dict[str, set[str]]:
    """The names that screens and JSON can show, by kind."""
    workloads = [*sweep.workloads(sweep.load("check"), {}, ("cpu",))[::4], *MORE]
    of_both = chain.from_iterable(chain(map(catalogue, workloads), map(backward_catalogue, workloads)))
    mistakes = {mistake.name for mistake in of_both}
    return {
        "verdict": {*CheckVerdict, *Mark} - {*map(str, Verdict), "equal"}
        | {"right where tried", "imprecise where tried"},
        "speed": set(Verdict),
        "reason": {reason.name for reason in Reason},
        "payoff": set(Payoff),
        "ending": set(Ending),
        "status": set(Status),
        "warning": set(Warn),
        "convention": set(CONVENTIONS),
        "rule": {*rules.RULES, *OF_PAGES, *dropout.RULES, EMPTY_ROWS, HIDDEN_NAN, *CONDUCT, "backward", rules.NO_RULE},
        "probe": set(PROBES),
        "mistake": mistakes | NAMED_BY_DIAGNOSIS,
        "gate": set(Kind),
        "screen": {"quiet", "busy", "noisy", "steady", "margin", "baseline"},
    }


def test_every_name_is_explained_and_nothing_else():
    every = shown()
    assert list(every) == list(KINDS)
    names = {str(name) for each in every.values() for name in each}
    assert all(map(explained, names))  # ValueError names one that is missing
    idle = [each.name for each in explanations() if not any(fnmatchcase(name, each.name) for name in names)]
    assert idle == [], "no screen shows these"


def test_reasons_and_equal_are_found_by_their_words():
    for reason in Reason:
        assert [each.name for each in explained(reason) if each.kind == "reason"] == [reason.name]
    assert {each.name for each in explained("equal")} == {"equivalent", "equal"}  # a verdict, and a probe
    assert explained("Wrong")[0].name == "WRONG"
    assert {grade.lower() for grade in CheckVerdict} <= {each.name.lower() for each in explanations()}


def test_each_entry_says_four_things():
    for each in explanations():
        for text in (each.means, each.why, each.example, each.do):
            assert text.strip() == text != "", each.name
        assert each.means.endswith("."), each.name


def test_explain_prints_one_name_or_lists_all():
    one = CliRunner().invoke(app, ["explain", "not", "judged"])
    assert one.exit_code == 0
    assert "There is no answer to compare" in one.stdout
    everything = CliRunner().invoke(app, ["explain"]).stdout
    assert "softmax_over_queries" in everything
    read = json.loads(CliRunner().invoke(app, ["explain", "contention", "--json"]).stdout)
    assert [each["kind"] for each in read] == ["warning"]
    assert set(read[0]) == {field.name for field in msgspec.structs.fields(type(explanations()[0]))}


def test_warnings_are_a_closed_list():
    """The schema of --json names every warning, another name is refused, and no name is idle."""
    assert msgspec.json.schema(verdict.Report)["$defs"]["Warn"]["enum"] == sorted(Warn)
    for wrong in ({"name": "another", "text": ""}, {"text": ""}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, verdict.Warning)
    source = "".join(path.read_text(encoding="utf-8") for path in HARNESS.rglob("*.py"))
    assert [name for name in Warn if f"Warn.{name}.says" not in source] == []


def test_an_unknown_name_gets_a_similar_one():
    with pytest.raises(ValueError, match="did you mean softmax_over_queries"):
        explained("softmax_over_query")
