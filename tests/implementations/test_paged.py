"""Implementations that read pages: PyTorch's kernel is handed what its signature takes, and FlexAttention is right.

A stand-in has the signature of `varlen_attn` at each known version, follows the block table by the textbook, and the
real check judges the passing. Only CUDA can show that the kernel itself is right.
"""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.checking.agreement import check
from attnbench.contract import Implementation, device
from attnbench.contract.loading import implementation, named
from attnbench.implementations import flashinfer_paged
from attnbench.storage.records import CheckVerdict
from attnbench.workloads import sweep
from attnbench.workloads.workload import Workload
from tests.checks import references
from tests.signatures import versions

VARLEN = "torch.nn.attention.varlen.varlen_attn"
PRESETS = sweep.workloads(sweep.load("serving"), {}, ("cpu",))
"""The usual batches of a service, as the sweep has them: decode, chunked prefill, speculative verify, mixed."""
MIXED = Workload(batch="2q9_q5kv40_q1kv48_q1kv33", page_size=16, num_heads=4, num_kv_heads=2, head_dim=16)


def varlen(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """`varlen_attn` with pages, by its documentation."""
    starts, lengths, table = given["cu_seq_q"], given["seqused_k"], given["block_table"]
    assert {each.dtype for each in (starts, lengths, table)} == {torch.int32}
    assert given["cu_seq_k"] is None  # the lengths are seqused_k
    assert (given["max_q"], given["max_k"]) == (int(starts.diff().max()), int(lengths.max()))
    left, right = given["window_size"]
    assert right == 0  # causal
    assert given["enable_gqa"] == (query.shape[1] != key.shape[2])
    return textbook(query, (key, value), starts.tolist(), lengths.tolist(), table.long(), given["scale"], left)


def textbook(
    query: Tensor,
    pools: tuple[Tensor, Tensor],
    starts: list[int],
    lengths: list[int],
    pages: Any,
    scale: float | None,
    left: int,
) -> Tensor:
    """Attention over pages: `pages` holds those of each request in order. A query sees `left` before it, or all."""
    outputs = []
    for row, length in enumerate(lengths):
        tokens = query[starts[row] : starts[row + 1]].transpose(0, 1)
        keys, values = (pool[pages[row]].flatten(0, 1)[:length].transpose(0, 1) for pool in pools)
        seen = torch.ones(tokens.shape[1], length, dtype=torch.bool).tril(length - tokens.shape[1])
        seen = seen.triu(length - tokens.shape[1] - left) if left >= 0 else seen
        outputs.append(
            F.scaled_dot_product_attention(
                tokens, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("version", versions(VARLEN))
def test_varlen_attn_is_handed_pages(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VARLEN, versions(VARLEN)[version].stand_in(varlen))
    found = named("torch_varlen_paged")
    on_cuda = MIXED.with_axes({"device": "cuda", "dtype": "bfloat16"})
    reason = found.unsupported(on_cuda)
    if version == "2.11.0":
        assert "before torch 2.12" in str(reason)
        return
    assert reason is None
    grade = check(references(MIXED), dataclasses.replace(found, unsupported=lambda _: None)).grade
    assert grade is CheckVerdict.right


def flash(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, **given: Any) -> Tensor:
    """`flash_attn_varlen_func` with pages, by its documentation."""
    starts, ends = given["cu_seqlens_q"], given["cu_seqlens_k"]
    assert {each.dtype for each in (starts, ends, block_table)} == {torch.int32}
    assert k.shape[1] % 256 == 0
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (int(starts.diff().max()), int(ends.diff().max()))
    left, right = given["window_size"]
    assert given["causal"]
    assert right == (-1 if left < 0 else 0)  # the kernel for decodes runs only without a limit on the right
    lengths = ends.diff().tolist()
    return textbook(q, (k, v), starts.tolist(), lengths, block_table.long(), given["softmax_scale"], left)


class Planner:
    """FlashInfer's class for pages, by its documentation."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, **_: Any) -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert kv_layout == "NHD"
        functions = {name: versions(f"{WRAPPER}.{name}")["0.7.4"] for name in ("plan", "run")}
        self.plan = functions["plan"].stand_in(lambda **given: vars(self).update(planned=SimpleNamespace(**given)))
        self.run = functions["run"].stand_in(self.computed)

    def computed(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        at = self.planned  # type: ignore[attr-defined] # `plan` set it
        firsts, lasts = at.paged_kv_indptr, at.paged_kv_last_page_len
        assert {each.dtype for each in (at.qo_indptr, firsts, at.paged_kv_indices, lasts)} == {torch.int32}
        assert (at.num_qo_heads, at.num_kv_heads, at.head_dim_qk) == (*q.shape[1:2], paged_kv_cache[0].shape[2], 64)
        assert (at.causal, at.q_data_type, at.kv_data_type) == (True, q.dtype, q.dtype)
        assert at.page_size == paged_kv_cache[0].shape[1]
        assert int(lasts.min()) >= 1
        assert int(lasts.max()) <= at.page_size
        pages = at.paged_kv_indices.long().split(firsts.diff().tolist())
        lengths = ((firsts.diff() - 1) * at.page_size + lasts).tolist()
        return textbook(q, paged_kv_cache, at.qo_indptr.tolist(), lengths, pages, at.sm_scale, at.window_left)


ON_CUDA = {"device": "cuda", "dtype": "bfloat16"}
WRAPPER, FLASH = "flashinfer.BatchPrefillWithPagedKVCacheWrapper", "flash_attn.flash_attn_interface"


def test_flash_attn_is_handed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(FLASH)
    vars(module)["flash_attn_varlen_func"] = versions(f"{FLASH}.flash_attn_varlen_func")["2.8.3"].stand_in(flash)
    for name, made in {"flash_attn": ModuleType("flash_attn"), FLASH: module}.items():
        monkeypatch.setitem(sys.modules, name, made)
    found = agree_on_pages("flash_attn_2_paged", MIXED.with_axes({"page_size": 256}), "pages of 256", monkeypatch)
    decodes = MIXED.with_axes(ON_CUDA | {"page_size": 256, "batch": "q0kv20_3q1kv40"})
    assert "a new token in each request" in str(found.unsupported(decodes))


def test_flashinfer_plans_for_the_pages_of_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = versions(WRAPPER)["0.7.4"].stand_in(Planner)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    flashinfer_paged.planner_on.cache_clear()
    asked = MIXED.with_axes({"head_dim": 64})
    empty = asked.with_axes({"batch": f"{MIXED.batch}_q0"})
    found = agree_on_pages("flashinfer_paged", asked, "one of 64, 128, 256", monkeypatch)
    flashinfer_paged.planner_on.cache_clear()  # it holds the stand-in
    assert "without keys" in str(found.unsupported(empty.with_axes(ON_CUDA)))


def agree_on_pages(name: str, asked: Workload, words: str, monkeypatch: pytest.MonkeyPatch) -> Implementation:
    """Require that the adapter passes what the package's function takes, and that it refuses MIXED with `words`."""
    monkeypatch.setattr(f"attnbench.implementations.{name}.missing_package", lambda *_: None)
    found = named(name)
    assert words in str(found.unsupported(MIXED.with_axes(ON_CUDA)))
    for axes in ({}, {"mask": "sliding_window(21)", "scale": 0.3}):
        point = asked.with_axes(axes)
        assert found.unsupported(point.with_axes(ON_CUDA)) is None
        judged = check(references(point, is_brief=bool(axes)), dataclasses.replace(found, unsupported=lambda _: None))
        assert judged.grade is CheckVerdict.right, judged.diagnosis
    return found


def test_without_cuda_it_says_so() -> None:
    assert "only on CUDA" in str(named("torch_varlen_paged").unsupported(MIXED))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda each: each.batch)
@pytest.mark.parametrize("name", ["paged_gather", "paged_loop"])
def test_batches_of_the_sweep_serving_agree_with_the_oracle(name: str, preset: Workload) -> None:
    judged = check(references(preset, is_brief=True), implementation(name))
    assert judged.grade is CheckVerdict.right, judged.diagnosis


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(device("cpu").missing_compiler() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("preset", PRESETS, ids=lambda each: each.batch)
def test_flex_attention_agrees_on_batches_of_the_sweep_serving(preset: Workload) -> None:
    judged = check(references(preset, is_brief=True), implementation("flex_paged"))
    assert judged.grade is CheckVerdict.right, judged.diagnosis


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(device("cpu").missing_compiler() is not None, reason="needs a C++ compiler")
def test_flex_attention_follows_a_block_table() -> None:
    found = implementation("flex_paged")
    if reason := found.unsupported(MIXED):
        pytest.skip(reason)
    brief = references(MIXED, is_brief=True)
    assert check(brief, found).grade is CheckVerdict.right
    assert "page_size >= 16" in str(found.unsupported(MIXED.with_axes({"page_size": 8})))
