"""A policy as data: the nearest shape's choice, its validity, and refused files."""

import json

import msgspec
import pytest

from attnbench.workloads.policy import Evidence, Policy, Regret, Row
from attnbench.workloads.workload import Workload

KIND = {"device": "cpu", "dtype": "float32", "direction": "inference", "queries": "many", "mask": "none"}
KIND |= {"is_grouped": False, "num_threads": 2}


def row(length, winner, ratio=0.5, **fields):
    shape = {"batch_heads": 8, "seq_len": length, "kv_len": length, "head_dim": 64}
    return Row(**(KIND | shape | {"winner": winner, "ratio": ratio} | fields))


ROWS = (row(16, "bmm"), row(64, "chunked"), row(256, "sdpa", 1.0))


def policy(**fields):
    given = {
        "machine": "00000000",
        "date": "2026-01-01",
        "environment": {},
        "num_threads": 2,
        "evidence": Evidence(runs=("a",), candidates=("bmm",)),
        "regret": Regret(mean=0.01, worst=0.02, sdpa_mean=0.1, sdpa_worst=0.5),
        "rows": ROWS,
    }
    return Policy(**(given | fields))


def plain(**axes):
    return Workload(**({"direction": "inference", "seq_len": 64, "num_heads": 8, "head_dim": 64} | axes))


@pytest.mark.parametrize(
    ("length", "choice"), [(16, "bmm"), (20, "bmm"), (45, "chunked"), (64, "chunked"), (100, "chunked"), (250, "sdpa")]
)
def test_the_winner_at_the_nearest_shape_is_chosen(length, choice):
    assert policy().choose(plain(seq_len=length)) == choice


def test_nearness_counts_all_sizes_in_octaves_and_a_factor_of_two_in_each_is_near():
    longer, wider = row(128, "bmm"), row(64, "chunked", batch_heads=16)
    both = policy(rows=(longer, wider))
    assert both.choose(plain(seq_len=90, num_heads=9)) == "bmm"
    assert both.choose(plain(seq_len=70, num_heads=14)) == "chunked"
    assert policy(rows=(row(48, "bmm"),)).choose(plain(seq_len=96, num_heads=16, head_dim=128)) == "bmm"


FAR = [{"seq_len": 4}, {"seq_len": 1100}, {"kv_len": 300}, {"num_heads": 32}, {"batch_size": 4}, {"head_dim": 16}]
OTHERS = [{"seq_len": 1, "kv_len": 16}, {"num_kv_heads": 2}, {"dtype": "bfloat16"}, {"direction": "forward"}]
OTHERS += [{"mask": "causal"}, {"scope": "module"}, {"dropout": 0.1, "direction": "forward"}, {"sinks": "learned"}]
OTHERS += [{"value_dim": 32}, {"num_threads": 128}]


@pytest.mark.parametrize("axes", FAR + OTHERS)
def test_calls_of_another_kind_or_far_from_every_shape_are_pytorchs_own(axes):
    always = policy(rows=tuple(msgspec.structs.replace(each, winner="bmm") for each in ROWS))
    assert always.choose(plain()) == "bmm"
    assert always.choose(plain(**axes)) == "sdpa"


def test_threads_of_0_are_those_of_the_policy():
    assert policy().choose(plain(num_threads=2)) == policy().choose(plain()) == "chunked"
    assert policy(num_threads=8).choose(plain()) == "sdpa"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"seq_len"', '"seq_length"', "its columns are not"),
        ("64, 64, 64, ", "64, -64, 64, ", ">= 1"),
        ("64, 64, 64, ", '64, "__import__", 64, ', "Expected `int`"),
        ("64, 64, 64, ", "64, 64, ", "."),
        ("0.5", "0", "> 0"),
        ('"chunked"', '"evil.py:run"', "names installed implementations"),
        ('"format": 3', '"format": 9', "format 9"),
        ('"rows"', '"row"', "unknown field"),
        ("}\n", "", "truncated"),
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


@pytest.mark.parametrize("old", [{"format": 1, "rules": []}, {"format": 2, "kinds": []}, {"kinds": []}])
def test_a_file_of_an_older_format_says_so_and_no_file_is_refused(tmp_path, old):
    path = tmp_path / "policy.json"
    with pytest.raises(ValueError, match="cannot read the policy"):
        Policy.load(path)
    path.write_text(json.dumps(old))
    with pytest.raises(ValueError, match=f"format {old.get('format', 0)}.*learn it again"):
        Policy.load(path)
