"""A policy as data: what it says, where it holds, and what of its file is refused."""

import json

import msgspec
import numpy as np
import pytest

from attnbench.workloads.policy import (
    COORDINATES,
    SIZES,
    Evidence,
    Kind,
    Policy,
    Regret,
    coordinates,
    digest,
    is_plain,
    values_of,
)
from attnbench.workloads.workload import Workload

SCALES = dict.fromkeys(COORDINATES, 2.0)
KIND = Kind(
    device="cpu",
    dtype="float32",
    direction="inference",
    queries="many",
    chosen={},
    candidates=("bmm", "chunked"),
    scales=SCALES,
    signal=1.0,
    noise=0.001,
    workloads=(
        ("none", 1, 16, 16, 64, 1, 2, 0.5, 1.4),
        ("none", 64, 64, 64, 64, 1, 2, 0.6, 1.2),
        ("none", 16, 200, 200, 64, 1, 2, 1.5, 1.2),
        ("none", 16, 1024, 1024, 64, 1, 2, None, 0.5),
    ),
)


def policy(**fields):
    given = {
        "machine": "00000000",
        "date": "2026-01-01",
        "environment": {},
        "num_threads": 2,
        "evidence": Evidence(runs=("a",), num_workloads=9, candidates=("bmm",)),
        "regret": Regret(mean=0.01, worst=0.02, sdpa_mean=0.1, sdpa_worst=0.5),
        "kinds": (KIND,),
    }
    return Policy(**(given | fields))


def plain(**axes):
    return Workload(**({"direction": "inference", "seq_len": 64} | axes))


def test_who_was_the_fastest_nearby_is_chosen_else_sdpa():
    assert policy().choose(plain(seq_len=20)) == "bmm"
    assert policy().choose(plain(seq_len=200, num_heads=16)) == "sdpa"
    assert policy().choose(plain(seq_len=900, num_heads=16)) == "chunked"


def test_what_is_expected_between_is_between_and_less_sure_than_what_was_measured():
    here, there = ({"mask": "none", **dict(zip(SIZES, row[1:7], strict=True))} for row in KIND.workloads[2:])
    between = here | {"seq_len": 450, "kv_len": 450}
    means, spreads = KIND.expected(np.array([coordinates(each) for each in (here, between, there)]))
    assert np.exp(means[0]) == pytest.approx([1.5, 1.2], rel=0.02)
    assert means[2, 1] < means[1, 1] < means[0, 1]
    assert (spreads[1] > 2 * spreads[0]).all()


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
    rows = tuple((*row[:7], 0.5, 0.9) for row in KIND.workloads)
    always = policy(kinds=(msgspec.structs.replace(KIND, workloads=rows),))
    assert always.choose(plain()) == "bmm"
    assert always.choose(plain(**axes)) == "sdpa"


def test_contenders_are_whoever_may_be_the_fastest_and_where_it_was_measured_nobody_is_tried():
    alike = tuple((*row[:7], 0.5, 1.4) for row in KIND.workloads)
    far = dict.fromkeys(COORDINATES, 30.0)
    sure = msgspec.structs.replace(KIND, scales=far, signal=1e-6, workloads=alike)
    assert policy(kinds=(sure,)).contenders(plain(seq_len=20)) == ("sdpa", "bmm")
    assert policy().contenders(plain(seq_len=20)) == ("sdpa", "bmm", "chunked")
    assert policy().contenders(Workload(**at_first())) == ("bmm",)


def at_first():
    """The axes of the first workload that was measured."""
    sizes = {"batch_size": 1, "num_heads": 1, "num_kv_heads": 1, "seq_len": 16, "head_dim": 64, "num_threads": 2}
    return sizes | {"direction": "inference"}


def test_contenders_are_named_somewhat_beyond_what_was_measured_but_nobody_is_chosen_untried():
    assert policy().choose(plain(seq_len=8)) == "sdpa"
    assert policy().contenders(plain(seq_len=8)) == ("sdpa", "bmm", "chunked")
    assert policy().contenders(plain(seq_len=3)) == ("sdpa",)
    assert policy().contenders(plain(seq_len=8, mask="causal")) == ("sdpa",)
    assert policy().contenders(plain(dtype="bfloat16")) == ("sdpa",)


def test_a_trial_settles_it_and_one_that_was_disturbed_hardly_counts():
    at, chosen = plain(seq_len=20), policy()
    means, spreads = KIND.expected(coordinates(values_of(at, 2))[None])
    assert means[0, 0] < np.log(0.7)
    assert chosen.settled(at, {"bmm": (np.log(1.5), 0.015)}) == "sdpa"
    assert chosen.settled(at, {"bmm": (np.log(1.5), 10 * spreads[0, 0])}) == "bmm"
    assert chosen.settled(at, {"bmm": (np.log(0.9), 0.015), "chunked": (np.log(0.7), 0.015)}) == "chunked"
    assert chosen.settled(at, {"bmm": (np.log(0.995), 0.001), "chunked": (np.log(0.99), 0.001)}) == "sdpa"
    assert chosen.settled(at, {}) == "sdpa"
    assert chosen.settled(plain(dtype="bfloat16"), {"bmm": (np.log(0.5), 0.01)}) == "sdpa"


def test_a_scale_is_no_other_kind_of_call():
    assert is_plain(plain(scale=0.3))


def test_a_file_is_read_as_it_was_written_with_a_line_for_each_workload(tmp_path):
    path = tmp_path / "new" / "policy.json"
    policy().save(path)
    text = path.read_text()
    assert json.loads(text)["kinds"][0]["candidates"] == ["bmm", "chunked"]
    assert [line for line in text.splitlines() if '["none"' in line][3].strip(" ,") == (
        '["none",16,1024,1024,64,1,2,null,0.5]'
    )
    assert msgspec.to_builtins(Policy.load(path)) == msgspec.to_builtins(policy())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"seq_len",', '"seq_length",', "a kind names the axes"),
        ('"is_grouped"', '"grouped"', "a kind names the axes"),
        ("0.6", "-0.6", "is not readable"),
        ("0.6", '"__import__"', "is not readable"),
        ("null,0.5", "0.5", "is not readable"),
        ('"chunked"', '"evil.py:run"', "names installed implementations"),
        ('"chunked"', '"fastest"', "names installed implementations"),
        ('"format": 2', '"format": 9', "format=9 is not known"),
        ('"kinds"', '"kind"', "unknown field"),
        ('"noise": 0.001', '"noise": 0', "above 0"),
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


def test_the_digest_of_fastest_changes_with_the_policy_alone(tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    monkeypatch.setenv("ATTNBENCH_POLICY", str(path))
    bare, other = digest("fastest"), digest("sdpa")
    policy().save(path)
    first = digest("fastest")
    policy(kinds=()).save(path)
    assert len({bare, first, digest("fastest")}) == 3
    assert digest("sdpa") == other
