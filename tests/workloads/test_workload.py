"""A workload is valid or an error that lists the allowed values; its id is stable, unique and fit for a path."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.workloads.workload import Workload
from tests import journals


def test_lengths_and_widths_follow_from_one_another():
    workload = Workload(seq_len=10, num_heads=4, embed_dim=32)
    assert (workload.kv_len, workload.num_kv_heads, workload.head_dim, workload.value_dim) == (10, 4, 8, 8)
    assert Workload(num_heads=3, head_dim=5).embed_dim == 15
    assert Workload().head_dim == 64


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"num_heads": 7, "embed_dim": 512}, "choose num_heads among the divisors of embed_dim"),
        ({"num_heads": 8, "num_kv_heads": 3}, "choose num_kv_heads among the divisors of num_heads"),
        ({"dtype": "int8"}, "one of float64, float32, bfloat16, float16"),
        ({"device": "cuda:x"}, "NAME or NAME:N"),
        ({"dropout": 1.0}, "a probability"),
        ({"float32_matmul_precision": "low"}, "one of highest, high, medium"),
        ({"float32_matmul_precision": "high", "dtype": "bfloat16"}, "choose dtype=float32"),
        ({"seq_len": 0}, "from 1 to 2^31"),
        ({"seed": -1}, "from 0 to 2^31"),
        ({"mask": "casual"}, "causal_bottom_right"),
        ({"mask": "sliding_window"}, "sliding_window(n)"),
        ({"mask": "padding(1,2,3)", "batch_size": 2}, "one length for each batch row"),
        ({"mask": "padding(600)", "seq_len": 512}, "none above kv_len"),
        ({"mask": "document(3,4)", "seq_len": 8}, "add up to seq_len"),
    ],
)
def test_what_is_not_allowed_is_refused_and_what_is_allowed_is_said(axes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Workload(**axes)


def workloads() -> st.SearchStrategy[Workload]:
    sizes = st.integers(1, 9)
    return st.builds(
        Workload,
        batch_size=sizes,
        seq_len=sizes,
        kv_len=st.integers(0, 9),
        num_heads=st.sampled_from([2, 4]),
        num_kv_heads=st.sampled_from([0, 1, 2]),
        head_dim=st.sampled_from([0, 8, 16]),
        value_dim=st.sampled_from([0, 8, 24]),
        embed_dim=st.sampled_from([0, 32]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        mask=st.sampled_from(["none", "causal", "padding", "sliding_window(3)", "prefix(2)"]),
        dropout=st.sampled_from([0.0, 0.1]),
        direction=st.sampled_from(["inference", "backward"]),
        scope=st.sampled_from(["attention", "module"]),
        num_threads=st.integers(0, 2),
        seed=st.integers(0, 2),
        layout=st.sampled_from(["contiguous", "transposed", "expanded", "broadcast"]),
    )


@given(workloads(), workloads())
def test_two_workloads_share_an_id_only_if_they_are_equal(one, other):
    assert (one.id == other.id) == (one == other)


@given(workloads())
def test_an_id_is_fit_for_a_path_and_a_workload_survives_json(workload):
    assert re.fullmatch(r"[a-z0-9_.-]+", workload.id)
    assert msgspec.json.decode(msgspec.json.encode(workload), type=Workload) == workload


def test_ids_stay_as_they_are():
    """Stored baselines are found by these ids: a change needs a new journal schema."""
    assert Workload().id == "attention-forward-cpu-float32-b1-t512-h8-k64"
    padded = Workload(batch_size=2, seq_len=8, kv_len=4, num_kv_heads=2, mask="padding(3,4)", device="cuda:1", seed=5)
    assert padded.id == "attention-forward-cuda1-float32-b2-t8-h8-k64-s4-g2-padding.3.4-seed5"
    laid = Workload(layout="transposed", float32_matmul_precision="high", dropout=0.1)
    assert laid.id == "attention-forward-cpu-float32-b1-t512-h8-k64-dropout0.1-layouttransposed-matmul_high"
    long = Workload(seq_len=100, mask=f"document({','.join(['1'] * 100)})")
    assert len(long.id) < 100


@pytest.mark.parametrize("base", ["10000", "500000", "1000000", "1e6", "1234567", "10000.5"])
def test_a_rotary_base_keeps_its_digits_and_can_be_read_again(base):
    """Qwen's base was written as 1e+06, which was then refused, and 1234567 as 1.23457e+06."""
    point = Workload(rotary=f"interleaved({base})", head_dim=8)
    assert point.rotary_base == float(base)
    assert msgspec.convert(msgspec.to_builtins(point), Workload) == point
    assert Workload(rotary=point.rotary, head_dim=8) == point


def test_a_workload_of_an_old_journal_is_read_with_the_defaults_of_later_axes():
    old = b'{"batch_size":1,"seq_len":8,"kv_len":8,"num_heads":2,"num_kv_heads":2,"head_dim":4,"value_dim":4,'
    old += b'"embed_dim":8,"dtype":"bfloat16","device":"cpu","mask":"causal","dropout":0.1,"direction":"inference",'
    old += b'"scope":"attention","num_threads":0,"seed":0}'
    read = msgspec.json.decode(old, type=Workload)
    assert (read.bias, read.layout, read.float32_matmul_precision) == ("all", "contiguous", "highest")
    assert read.id == "attention-inference-cpu-bfloat16-b1-t8-h2-k4-causal-dropout0.1"


def test_memory_tells_machines_apart_by_whole_gib_and_is_stored_to_the_byte():
    here = journals.ENVIRONMENT
    updated = msgspec.structs.replace(here, memory_bytes=here.memory_bytes - 12_345_678)  # the kernel keeps some more
    assert updated.fingerprint == here.fingerprint
    assert msgspec.json.decode(msgspec.json.encode(updated), type=type(here)).memory_bytes == 8 * 2**30 - 12_345_678
    assert msgspec.structs.replace(here, memory_bytes=7 * 2**30).fingerprint != here.fingerprint
