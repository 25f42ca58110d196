"""Calls of a service in the format flashinfer-trace, read as workloads."""

import json
from pathlib import Path

import pytest

from attnbench.workloads import flashinfer_trace
from attnbench.workloads.flashinfer_trace import IN_ONE_PIECE, MEAN_LENGTHS
from attnbench.workloads.workload import Workload

DECODE = "gqa_paged_decode_h32_kv8_d128_ps16"
BF16 = {"dtype": "bfloat16", "direction": "inference"}


def line(axes, definition=DECODE, **inputs) -> str:
    workload = {"uuid": "one", "axes": axes, "inputs": inputs}
    return json.dumps({"definition": definition, "workload": workload, "solution": None, "evaluation": None})


def one(tmp_path: Path, *lines: str, name: str = "calls.jsonl", **settings) -> tuple[Workload, str]:
    """Return the only workload in a file with these lines, and the label of all of them."""
    (tmp_path / name).write_text("\n".join(lines))
    given = {axis: [value] for axis, value in settings.items()}
    (workload,), (mix,) = flashinfer_trace.load(tmp_path / name, given)
    assert mix.counts == {workload.id: len(lines)}
    return workload, mix.label


@pytest.mark.parametrize(
    ("definition", "axes", "expected"),
    [
        (DECODE, {"batch_size": 1, "len_indptr": 2, "num_pages": 99, "num_kv_indices": 64},
         Workload(**BF16, seq_len=1, kv_len=1024, num_heads=32, num_kv_heads=8, head_dim=128)),
        ("gqa_paged_prefill_causal_h32_kv8_d128_ps1", {"total_q": 5, "len_indptr": 2, "num_kv_indices": 40},
         Workload(**BF16, seq_len=5, kv_len=40, num_heads=32, num_kv_heads=8, head_dim=128,
                  mask="causal_bottom_right")),
        ("gqa_ragged_prefill_causal_h6_kv1_d128", {"total_q": 70, "len_indptr": 2, "total_kv": 70},
         Workload(**BF16, seq_len=70, num_heads=6, num_kv_heads=1, head_dim=128, mask="causal")),
        ("mla_paged_decode_h16_ckv512_kpe64_ps1", {"batch_size": 1, "len_indptr": 2, "num_kv_indices": 40},
         Workload(**BF16, seq_len=1, kv_len=40, num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512,
                  layout="value_in_key", scale=192**-0.5)),
        ("mla_paged_prefill_causal_h16_ckv512_kpe64_ps1", {"total_q": 40, "len_indptr": 2, "num_kv_indices": 40},
         Workload(**BF16, seq_len=40, num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512,
                  layout="value_in_key", scale=192**-0.5, mask="causal")),
        ("mla_ragged_prefill_causal_h16_qk192_vo128", {"total_q": 40, "len_indptr": 2, "total_kv": 40},
         Workload(**BF16, seq_len=40, num_heads=16, head_dim=192, value_dim=128, mask="causal")),
    ],
)  # fmt: skip
def test_every_kind_of_definition(tmp_path, definition, axes, expected):
    found, label = one(tmp_path, line(axes, definition))
    assert found == expected
    assert label.startswith("calls.jsonl")
    assert (IN_ONE_PIECE in label) == ("paged" in definition)


def test_a_workload_alone_has_its_definition_in_the_name_of_its_file(tmp_path):
    bare = json.dumps({"uuid": "x", "axes": {"batch_size": 4, "num_kv_indices": 8}, "inputs": {}})
    found, label = one(tmp_path, bare, bare, name=f"{DECODE}.jsonl")
    assert (found.batch_size, found.kv_len, found.mask) == (4, 32, "none")
    assert MEAN_LENGTHS in label


def test_settings_take_the_place_of_what_a_line_has(tmp_path):
    found, _ = one(tmp_path, line({"batch_size": 1, "num_kv_indices": 8}), dtype="float32", num_threads="1")
    assert (found.dtype, found.num_threads) == ("float32", 1)


@pytest.mark.parametrize(("value", "expected"), [(0.0883883461356163, 0.0), (0.5, 0.5)])
def test_a_scale_that_is_usual_but_for_float32_is_the_usual_one(tmp_path, value, expected):
    scale = {"type": "scalar", "value": value}
    found, _ = one(tmp_path, line({"batch_size": 1, "num_kv_indices": 8}, sm_scale=scale))
    assert found.scale == expected


@pytest.fixture
def tensors(tmp_path):
    """Write whole numbers into a safetensors file of another folder, and return the input that names it."""
    numpy = pytest.importorskip("safetensors.numpy")
    import numpy as np

    (tmp_path / "blob").mkdir()

    def written(name: str, *numbers: int) -> dict[str, str]:
        numpy.save_file({"t": np.asarray(numbers, dtype=np.int32)}, str(tmp_path / "blob" / name))
        return {"type": "safetensors", "path": f"blob/{name}", "tensor_key": "t"}

    return written


def test_lengths_are_exact_where_their_tensors_are_at_hand(tmp_path, tensors):
    (tmp_path / "workloads").mkdir()
    inputs = {"kv_indptr": tensors("kv", 0, 3, 3, 8), "kv_last_page_len": tensors("last", 7, 1, 16)}
    text = line({"batch_size": 3, "num_kv_indices": 8}, **inputs)
    found, label = one(tmp_path, text, name="workloads/calls.jsonl")
    assert (found.batch_size, found.seq_len, found.kv_len, found.mask) == (2, 1, 80, "ragged(39,80)")
    assert MEAN_LENGTHS not in label
    pages = line({"batch_size": 3, "num_kv_indices": 8}, kv_indptr=inputs["kv_indptr"])
    assert one(tmp_path, pages)[0].mask == "ragged(48,80)"
    prefill = {"qo_indptr": tensors("q", 0, 4, 8), "kv_indptr": tensors("s", 0, 4, 10)}
    axes = {"total_q": 8, "total_kv": 10, "len_indptr": 3}
    assert one(tmp_path, line(axes, "gqa_ragged_prefill_causal_h6_kv1_d128", **prefill))[0].mask == "ragged(4,6)"
    uneven = prefill | {"qo_indptr": tensors("u", 0, 2, 8)}
    found, label = one(tmp_path, line(axes, "gqa_ragged_prefill_causal_h6_kv1_d128", **uneven))
    assert (found.seq_len, found.kv_len, found.mask) == (4, 5, "causal_bottom_right")
    assert MEAN_LENGTHS in label


def test_what_cannot_be_kept_is_said(tmp_path):
    absorbed = line({"batch_size": 1, "num_kv_indices": 8}, "mla_paged_decode_h16_ckv512_kpe64_ps64")
    found, label = one(tmp_path, absorbed)
    assert found.kv_len == 512
    assert IN_ONE_PIECE in label


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no workloads"),
        ("no json", "line 1 is no workload"),
        ('{"axes": {}}', "line 1 is no workload"),
        ('{"definition": 5, "workload": {"uuid": "x", "axes": {"batch_size": 1}}}', "line 1 is no workload"),
        (line({"batch_size": "many"}), "line 1 is no workload"),
        (
            line({"M": 1024}, "gemm_n_4096_k_4096"),
            "line 1: the definition gemm_n_4096_k_4096 is not known: it is one of",
        ),
        (line({"batch_size": 4}), "line 1: its axes have no num_kv_indices or total_kv above 0, only batch_size=4"),
        (line({"len_indptr": 1, "num_kv_indices": 4}), "line 1: its len_indptr is 1"),
        (
            line({"batch_size": 4, "num_kv_indices": 4}, "gqa_paged_decode_h6_kv4_d64_ps1"),
            "line 1: num_heads=6 does not",
        ),
    ],
)
def test_what_is_no_such_file_is_refused_with_its_line(tmp_path, text, complaint):
    (tmp_path / "calls.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"calls\.jsonl") as error:
        flashinfer_trace.load(tmp_path / "calls.jsonl", {})
    assert complaint in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        flashinfer_trace.load(tmp_path / "none.jsonl", {})
