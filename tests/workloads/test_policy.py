"""A policy as data: what it says, where it holds, and what of its file is refused."""

import json

import msgspec
import pytest

from attnbench.workloads.policy import Condition, Evidence, Policy, Regret, Rule, digest, is_plain
from attnbench.workloads.workload import Workload

COVER = {
    "device": "cpu",
    "dtype": "float32",
    "direction": "inference",
    "mask": "none",
    **dict.fromkeys(("seq_len", "kv_len"), (16, 1024)),
    **dict.fromkeys(("batch_heads", "head_dim", "group_size", "num_threads"), (1, 64)),
}
RULES = (
    Rule(when=("seq_len <= 128", "dtype is float32"), use="bmm"),
    Rule(when=("pairs > 100000",), use="chunked"),
)


def policy(**fields):
    given = {
        "machine": "00000000",
        "date": "2026-01-01",
        "environment": {},
        "num_threads": 2,
        "evidence": Evidence(runs=("a",), num_workloads=9, candidates=("bmm",)),
        "regret": Regret(mean=0.01, worst=0.02, sdpa_mean=0.1, sdpa_worst=0.5),
        "covers": (COVER,),
        "rules": RULES,
    }
    return Policy(**(given | fields))


def plain(**axes):
    return Workload(**({"direction": "inference", "seq_len": 64} | axes))


def test_the_first_rule_that_holds_decides_else_sdpa():
    assert policy().choose(plain()) == "bmm"
    assert policy().choose(plain(seq_len=200)) == "sdpa"
    assert policy().choose(plain(seq_len=512)) == "chunked"


@pytest.mark.parametrize(
    "axes",
    [
        {"seq_len": 8},
        {"seq_len": 64, "kv_len": 2048},
        {"dtype": "bfloat16"},
        {"direction": "forward"},
        {"mask": "causal"},
        {"scope": "module"},
        {"direction": "forward", "dropout": 0.1},
        {"sinks": "learned"},
        {"head_dim": 64, "value_dim": 32},
        {"num_threads": 128},
    ],
)
def test_what_was_not_measured_is_pytorchs_own(axes):
    assert policy(rules=(Rule(when=(), use="bmm"),)).choose(plain(**axes)) == "sdpa"


def test_a_scale_is_no_other_kind_of_call():
    assert is_plain(plain(scale=0.3))


def test_a_file_is_read_as_it_was_written_with_a_line_for_each_rule(tmp_path):
    path = tmp_path / "new" / "policy.json"
    policy().save(path)
    text = path.read_text()
    assert json.loads(text)["rules"][0]["when"] == ["seq_len <= 128", "dtype is float32"]
    assert sum("use" in line for line in text.splitlines()) == len(RULES)
    assert msgspec.to_builtins(Policy.load(path)) == msgspec.to_builtins(policy())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seq_len <= 128", "seq_length <= 128", "seq_len"),
        ("seq_len <= 128", "seq_len is 128", "takes <= or >"),
        ("seq_len <= 128", "__import__('os')", "not readable"),
        ("dtype is float32", "dtype > float32", "takes 'is'"),
        ('"chunked"', '"evil.py:run"', "names installed implementations"),
        ('"chunked"', '"fastest"', "names installed implementations"),
        ('"format": 1', '"format": 9', "format=9 is not known"),
        ('"rules"', '"ruled"', "unknown field"),
        ('"seq_len": [16, 1024]', '"seq_len": "all"', "give"),
        ('"kv_len"', '"key_len"', "each of `covers` names"),
        ("}\n", "", "not readable"),
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path, old, new, message):
    path = tmp_path / "policy.json"
    policy().save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new) if old != "}\n" else text[: len(text) // 2])
    with pytest.raises(ValueError, match=message) as raised:
        Policy.load(path)
    assert "learn it again" in str(raised.value)


def test_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read the policy"):
        Policy.load(tmp_path / "none.json")


def test_a_condition_is_the_text_that_it_was_read_from():
    for text in ("seq_len <= 5", "pairs > 7", "mask is causal", "dtype is not float16"):
        assert str(Condition.parse(text)) == text


def test_the_digest_of_fastest_changes_with_the_policy_alone(tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    monkeypatch.setenv("ATTNBENCH_POLICY", str(path))
    bare, other = digest("fastest"), digest("sdpa")
    policy().save(path)
    first = digest("fastest")
    policy(rules=()).save(path)
    assert len({bare, first, digest("fastest")}) == 3
    assert digest("sdpa") == other
