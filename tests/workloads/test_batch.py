"""Batches of requests: the spelling of vLLM's benchmark, where their keys lie, and bad input in one line."""

import itertools

import numpy as np
import pytest

from attnbench.workloads import counts
from attnbench.workloads.batch import Request, parse_batch, written
from attnbench.workloads.workload import Workload

DECODE, SPECULATIVE, PREFILL = Request(1, 1024), Request(4, 1024), Request(2048, 2048)
OF_README = {
    "q2k": [PREFILL],
    "q1kv1k": [DECODE],
    "8q1kv1k": [DECODE] * 8,
    "q4kv1k": [SPECULATIVE],
    "2q2k_32q1kv1k": [PREFILL] * 2 + [DECODE] * 32,
    "16q4kv1k": [SPECULATIVE] * 16,
    "q1s1k": [DECODE],
    "8q1s1k": [DECODE] * 8,
    "q4s1k": [SPECULATIVE],
    "2q2k_32q1s1k": [PREFILL] * 2 + [DECODE] * 32,
    "16q4s1k": [SPECULATIVE] * 16,
    "32q1s1k": [DECODE] * 32,
    "64q1s1k": [DECODE] * 64,
    "64q1s4k": [Request(1, 4096)] * 64,
    "64q1s16k": [Request(1, 16384)] * 64,
    "q8s2k": [Request(8, 2048)],
    "2q2k_q4s1k_32q1s1k": [PREFILL] * 2 + [SPECULATIVE] + [DECODE] * 32,
    "q512": [Request(512, 512)],
    "q1ks2k": [Request(1024, 2048)],
    "2q1ks4k": [Request(1024, 4096)] * 2,
}
"""Batches of benchmarks/attention_benchmarks in vLLM (README, configs/standard_attention.yaml), both spellings."""


@pytest.mark.parametrize(("text", "requests"), OF_README.items())
def test_batches_of_vllm_are_read_alike(text: str, requests: list[Request]) -> None:
    assert [*parse_batch(text)] == requests
    assert [*parse_batch(written(tuple(requests)))] == requests


def test_both_spellings_are_one_workload() -> None:
    assert Workload(batch="2q2k_32q1s1k") == Workload(
        batch="2q2k_32q1kv1k", batch_size=7, seq_len=5, direction="inference"
    )
    assert Workload(batch="q1kv8_q1kv8") == Workload(batch="2q1kv8")


BAD = [
    ({"batch": "two"}, "batch=two", "[count]q<new tokens>[kv<keys>]"),
    ({"batch": "q1kv8__q2"}, "batch=q1kv8__q2", "which is empty"),
    ({"batch": "q5kv2"}, "batch=q5kv2", "give kv5 or more"),
    ({"batch": "q0kv9"}, "batch=q0kv9", "give at least one q1"),
    ({"batch": "q2", "page_size": 12}, "page_size=12", "a power of 2"),
    ({"batch": "q2kv40", "page_size": 16, "shared_prefix": 20}, "shared_prefix=20", "shared_prefix=32"),
    ({"batch": "q2kv40_q8kv20", "page_size": 16, "shared_prefix": 32}, "shared_prefix=32", "at most that"),
    ({"shared_prefix": 16}, "shared_prefix=16", "page_size=16"),
    ({"batch": "q2", "cache_dtype": "fp8"}, "cache_dtype=fp8", "float8_e4m3fn"),
    ({"batch": "q2", "mask": "causal"}, "mask=causal", "leave it out"),
    ({"batch": "q2", "direction": "backward"}, "direction=backward", "direction=inference"),
    ({"batch": "q2", "scope": "module"}, "scope=module", "leave it out"),
    ({"page_size": 16, "seq_len": 9, "kv_len": 5}, "page_size=16", "kv_len of at least seq_len"),
]


@pytest.mark.parametrize(("axes", "named", "way_out"), BAD)
def test_bad_input_is_one_line_with_the_field_and_the_way_out(
    axes: dict[str, object], named: str, way_out: str
) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        Workload(**axes)  # type: ignore[arg-type] # as a user's
    assert named in str(caught.value)
    assert way_out in str(caught.value)


def test_requests_see_their_own_keys_up_to_their_own_place() -> None:
    workload = Workload(batch="q2kv4_q0kv3_q1kv2_q2")
    seen = workload.mask_rule.dense(1, workload.seq_len, workload.kv_len)[0]
    rows = ["11100000000", "11110000000", "00000001100", "00000000010", "00000000011"]
    assert ["".join(map(str, row)) for row in seen.astype(int)] == rows
    assert workload.mask_rule.num_visible(1, workload.seq_len, workload.kv_len) == 12
    assert not workload.mask_rule.has_empty_rows(1, workload.seq_len, workload.kv_len)


@pytest.mark.parametrize("prefix", [0, 32])
def test_each_key_has_a_slot_of_its_own_but_in_shared_pages(prefix: int) -> None:
    workload = Workload(batch="q4kv40_3q1kv49_q1kv33", page_size=16, shared_prefix=prefix, seed=3)
    cache = workload.cache
    assert cache is not None
    layout = cache.layout()
    assert len(np.unique(layout.slots)) == cache.num_keys == workload.kv_len - 4 * prefix
    starts = np.cumsum([0, *(each.total for each in workload.requests)])
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        at = np.arange(end - start)
        assert (layout.slots[start:end] == layout.block_table[row, at // 16] * 16 + at % 16).all()
    assert (layout.slots[cache.sources()] == layout.slots).all()
    used = {*(layout.slots // 16)}
    beyond = [layout.block_table[row, -(-each.total // 16) :] for row, each in enumerate(workload.requests)]
    assert used.isdisjoint(np.concatenate(beyond))  # unused entries name pages that nobody uses


def test_bytes_of_a_cache_are_those_that_must_be_read() -> None:
    plain = Workload(batch="4q1kv64", page_size=16, num_heads=4, num_kv_heads=2, head_dim=8)
    each = 2 * (8 + 8)
    assert counts.cache_bytes(plain) == 4 * 64 * each * 4
    assert counts.cache_bytes(plain.with_axes({"cache_dtype": "float8_e5m2"})) == 4 * 64 * each
    assert counts.cache_bytes(plain.with_axes({"shared_prefix": 32})) == (4 * 64 - 3 * 32) * each * 4
    assert counts.cache_bytes(plain.with_axes({"batch": "4q1kv64_q0kv64"})) == 4 * 64 * each * 4
    queries_and_outputs = 2 * 4 * 4 * 8 * 4
    assert counts.compulsory_bytes(plain) == counts.cache_bytes(plain) + queries_and_outputs


def test_a_batch_at_another_length_keeps_its_requests() -> None:
    workload = Workload(batch="q20kv400_2q1kv100_q0", page_size=16, shared_prefix=64)
    short = workload.at_length(40)
    assert short.requests == (Request(2, 40), Request(1, 10), Request(1, 10), Request(0, 0))
    assert (short.longest, short.shared_prefix) == (40, 0)
