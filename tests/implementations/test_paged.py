"""Implementations that read pages: PyTorch's kernel is handed what its signature takes, and FlexAttention is right.

A stand-in has the signature of `varlen_attn` at each known version, follows the block table by the textbook, and the
real check judges the passing. Only CUDA can show that the kernel itself is right.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.checking.agreement import check
from attnbench.contract import device
from attnbench.contract.loading import implementation, named
from attnbench.storage.records import Grade
from attnbench.workloads.workload import Workload
from tests.checks import references
from tests.signatures import versions

VARLEN = "torch.nn.attention.varlen.varlen_attn"
MIXED = Workload(batch="2q9_q5kv40_q1kv48_q1kv33", page_size=16, num_heads=4, num_kv_heads=2, head_dim=16)


def varlen(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """`varlen_attn` with pages, by its documentation."""
    starts, lengths, table = given["cu_seq_q"], given["seqused_k"], given["block_table"]
    assert {each.dtype for each in (starts, lengths, table)} == {torch.int32}
    assert given["cu_seq_k"] is None  # the lengths are seqused_k
    assert (given["max_q"], given["max_k"]) == (int(starts.diff().max()), int(lengths.max()))
    assert given["window_size"] == (-1, 0)  # causal
    assert given["enable_gqa"] == (query.shape[1] != key.shape[2])
    outputs = []
    for row, length in enumerate(lengths.tolist()):
        tokens = query[starts[row] : starts[row + 1]].transpose(0, 1)
        keys, values = (pool[table[row].long()].flatten(0, 1)[:length].transpose(0, 1) for pool in (key, value))
        seen = torch.ones(tokens.shape[1], length, dtype=torch.bool).tril(length - tokens.shape[1])
        outputs.append(
            F.scaled_dot_product_attention(
                tokens, keys, values, attn_mask=seen, scale=given["scale"], enable_gqa=True
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
    assert grade is Grade.right


def test_without_cuda_it_says_so() -> None:
    assert "only on CUDA" in str(named("torch_varlen_paged").unsupported(MIXED))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(device("cpu").missing_compiler() is not None, reason="needs a C++ compiler")
def test_flex_attention_follows_a_block_table() -> None:
    found = implementation("flex_paged")
    if reason := found.unsupported(MIXED):
        pytest.skip(reason)
    brief = references(MIXED, is_brief=True)
    assert check(brief, found).grade is Grade.right
    assert "page_size >= 16" in str(found.unsupported(MIXED.with_axes({"page_size": 8})))
