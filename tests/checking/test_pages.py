"""Functions that read a paged cache: planted mistakes are caught and named, honest code is right.

`attend` reads a cache as a person would write it, and each mistake changes one place of it.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from attnbench import plugins
from attnbench.case import QKV, bind
from attnbench.checking.agreement import check
from attnbench.checking.page_mistakes import page_mistakes
from attnbench.contract import Implementation
from attnbench.contract.functions import from_function
from attnbench.contract.loading import implementation
from attnbench.contract.pages import PageSignature, bytes_of, names_of
from attnbench.plugins import PAGED
from attnbench.storage.records import Agreement, CheckVerdict
from attnbench.workloads import sweep
from attnbench.workloads.workload import Workload
from tests.checks import cell_of, checked, references

ROOT = Path(__file__).parents[2]
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
MIXED = Workload(batch="2q9_q5kv40_q1kv48_q1kv33_q0", page_size=16, **SIZES)
EIGHT_BITS = Workload(batch="q5kv40_2q1kv33", page_size=16, cache_dtype="float8_e4m3fn", dtype="bfloat16", **SIZES)
WINDOWED = Workload(batch="q9_q5kv40_q1kv48", page_size=16, mask="sliding_window(21)", **SIZES)
SHARED = Workload(batch="q4kv40_q1kv49_q1kv33", page_size=16, shared_prefix=32, **SIZES)
Keep = dict[object, object]


def attend(
    query: Tensor, cache: tuple[Tensor, Tensor], table: Tensor, lengths: Tensor, starts: Tensor, **changes: Callable
) -> Tensor:
    """The right answer, but for `changes` of what a line gives, by the line's name."""

    def change(name: str, value: object, *more: object) -> object:
        return changes[name](value, *more) if name in changes else value

    page_size, outputs, wide = cache[0].shape[1], [], change("wide", torch.float32)
    for request in range(len(lengths)):
        tokens, used = query[starts[request] : starts[request + 1]], int(lengths[request])
        if len(tokens) == 0:
            continue
        length = change("length", used, page_size)
        at = torch.arange(length)
        row = table[change("row", request)].long()
        address = change("address", row[at // page_size] * page_size + at % page_size, row, at, cache[0])
        key, value = (each.flatten(0, 1)[address].to(wide) for each in cache)
        key, value = change("scaled", (key, value))
        readers = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(readers, dim=1) for each in (key, value))
        key, value = change("heads", (key, value))
        scores = torch.einsum("thk,shk->hts", tokens.to(wide), key) / math.sqrt(query.shape[-1])
        last = change("last", length - len(tokens) + torch.arange(len(tokens)), length, used)
        scores = scores.masked_fill(at > last[:, None], -math.inf)
        weights = change("weights", scores.softmax(dim=-1), scores, request)
        outputs.append(torch.einsum("hts,shv->thv", weights, value).to(query.dtype))
    return torch.cat(outputs)


def halves(_: Tensor, scores: Tensor, __: int) -> Tensor:
    """Two parts of the keys, each with its own softmax, count alike."""
    middle = (scores.shape[-1] + 1) // 2
    parts = [scores[..., :middle].softmax(-1).nan_to_num(), scores[..., middle:].softmax(-1).nan_to_num()]
    merged = torch.cat(parts, dim=-1)
    return merged / merged.sum(dim=-1, keepdim=True)


def alone(weights: Tensor, scores: Tensor, request: int) -> Tensor:
    """The shared prefix is read for the first request alone."""
    hidden = scores.masked_fill(torch.arange(scores.shape[-1]) < 32 * (request > 0), -math.inf)
    return hidden.softmax(-1)


MISTAKES: dict[str, dict[str, Callable]] = {
    "last_page_whole": {"length": lambda used, size: -(-used // size) * size},
    "one_key_more": {"length": lambda used, _: used + 1},
    "one_key_less": {"length": lambda used, _: used - 1},
    "unused_nan": {
        "length": lambda used, size: -(-used // size) * size,
        "last": lambda at, length, used: at - length + used,
    },
    "page_and_slot_swapped": {"address": lambda _, row, at, pool: at % 16 * len(pool) + row[at // 16]},
    "another_block_table": {"row": lambda _: 0},
    "chunk_at_the_start": {"last": lambda at, *_: at - at[0]},
    "new_tokens_not_causal": {"last": lambda at, *_: at[-1:].expand_as(at)},
    "merged_without_logsumexp": {"weights": halves},
}
OF_SCALES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "scales_swapped": lambda key, _: (key, key),
    "scales_left_out_or_twice": lambda key, value: (key, value**2),
    "scales_of_other_heads": lambda key, value: (key[:1], value[:1]),
}


def paged(**changes: Callable) -> Implementation:
    def attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q):
        return attend(query, (key_cache, value_cache), block_table, seq_lens, cu_seqlens_q, **changes)

    return from_function(attention, "attention")


def in_8_bits(scales: Callable) -> Implementation:
    def attention(query, key_cache, value_cache, block_table, cache_seqlens, cu_seqlens_q, k_scale, v_scale):
        def scaled(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            return tuple(each * own[:, None] for each, own in zip(pair, scales(k_scale, v_scale), strict=True))

        cache = (key_cache, value_cache)
        return attend(query, cache, block_table, cache_seqlens, cu_seqlens_q, scaled=scaled)

    return from_function(attention, "attention")


def judged(made: Implementation, workload: Workload = MIXED) -> Agreement:
    return check(references(workload), made)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught_and_named(name: str) -> None:
    found = judged(paged(**MISTAKES[name]))
    assert found.grade is CheckVerdict.wrong
    assert name in found.mistakes, found.diagnosis


@pytest.mark.parametrize("name", OF_SCALES)
def test_a_mistake_in_scales_is_caught_and_named(name: str) -> None:
    found = judged(in_8_bits(OF_SCALES[name]), EIGHT_BITS)
    assert found.grade is CheckVerdict.wrong
    assert name in found.mistakes, found.diagnosis


@pytest.mark.parametrize("name", [None, "scales_swapped", "scales_left_out_or_twice"])
def test_a_function_may_take_one_scale_for_a_tensor(name: str | None) -> None:
    scales = OF_SCALES[name] if name else lambda key, value: (key, value)
    workload = EIGHT_BITS.with_axes({"cache_scales": "per_tensor"})
    kept = list[tuple[Tensor, Tensor]]()
    found = judged(in_8_bits(lambda *own: kept.append(own) or scales(*own)), workload)
    assert {each.shape for pair in kept for each in pair} == {(1,)}
    assert found.mistakes[:1] == ((name,) if name else ())
    assert found.grade is (CheckVerdict.wrong if name else CheckVerdict.right)


@pytest.mark.parametrize(
    ("kept", "workload", "words"),
    [
        ("scale", MIXED, "another scale of the scores"),
        ("cache", EIGHT_BITS, "another scale of the cache"),
        ("window", WINDOWED, "another window"),
        ("", MIXED, ""),
        ("", EIGHT_BITS, ""),
        ("", WINDOWED, ""),
    ],
)
def test_a_plan_that_keeps_a_setting_of_an_earlier_call_is_named(kept: str, workload: Workload, words: str) -> None:
    plans: dict[object, dict[str, object]] = {}

    def attention(
        query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, softmax_scale, window_size, k_scale, v_scale
    ):
        scales = (k_scale, v_scale) if k_scale is None else (k_scale.clone(), v_scale.clone())
        now = {"scale": softmax_scale, "window": window_size, "cache": scales}
        used = now | {name: value for name, value in plans.setdefault(query.shape, now).items() if name == kept}
        left = used["window"][0]
        query = query * (used["scale"] * query.shape[-1] ** 0.5)
        cache = [pool.float() for pool in (key_cache, value_cache)]
        if k_scale is not None:
            cache = [pool * scale[:, None] for pool, scale in zip(cache, used["cache"], strict=True)]

        def weights(given: Tensor, scores: Tensor, request: int) -> Tensor:
            num_rows, num_keys = scores.shape[-2:]
            first = num_keys - num_rows + torch.arange(num_rows)[:, None] - (left if left >= 0 else num_keys)
            return scores.masked_fill(torch.arange(num_keys) < first, -math.inf).softmax(dim=-1)

        return attend(query, tuple(cache), block_table, seq_lens, cu_seqlens_q, weights=weights)

    found = judged(from_function(attention, "attention"), workload)
    assert found.grade is (CheckVerdict.wrong if kept else CheckVerdict.right), found.diagnosis
    assert words in " ".join(each.found for each in found.broken_rules)


def test_longer_requests_that_a_function_does_not_support_are_no_note() -> None:
    def attention(query, key, value, is_causal=False):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    found = judged(from_function(attention, "attention"), Workload(batch="2q5", page_size=16, **SIZES))
    assert not {"neighbours", "another batch"} & {rule.rule for rule in found.notes}
    assert found.grade is CheckVerdict.right


def test_an_answer_that_depends_on_the_order_of_requests_is_noted() -> None:
    def weights(given: Tensor, scores: Tensor, request: int) -> Tensor:
        return given * (1 + 1e-7 * (request > 1 and scores.shape[-1] == 607))  # the keys of the first two requests

    found = judged(paged(wide=lambda _: torch.float64, weights=weights), MIXED)
    notes = {rule.rule: rule.found for rule in found.notes}
    assert "in reverse order the requests" in notes["neighbours"]


def test_a_shared_page_that_one_request_reads_is_named() -> None:
    found = judged(paged(weights=alone), SHARED)
    assert "shared_page_of_one" in found.mistakes, found.diagnosis


@pytest.mark.parametrize("kept", ["table", "plan"])
def test_a_block_table_or_plan_that_is_kept_is_named(kept: str) -> None:
    plans: dict[object, list[Tensor]] = {}

    def attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q):
        made = [block_table, seq_lens, cu_seqlens_q]
        plan = plans.setdefault((kept, query.shape, block_table.shape), [each.clone() for each in made])
        used = plan if kept == "table" else [block_table, *plan[1:]]
        return attend(query, (key_cache, value_cache), *used)

    found = judged(from_function(attention, "attention"))
    assert found.mistakes == ("kept_plan",), found.diagnosis


def test_a_workspace_that_is_not_cleared_is_named() -> None:
    """Each part of 128 keys adds the sum of its values, of which a later and shorter call has fewer."""
    parts: dict[object, Tensor] = {}

    def attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q):
        output = attend(query, (key_cache, value_cache), block_table, seq_lens, cu_seqlens_q)
        longest = int(seq_lens.max())
        for part in range(128, longest, 128):
            parts[part, query.shape] = output.clone()
        return output + sum(kept for (part, shape), kept in parts.items() if part >= longest and shape == query.shape)

    found = judged(from_function(attention, "attention"))
    assert found.mistakes == ("kept_plan",), found.diagnosis
    assert "workspace" in str(found.diagnosis)


def test_pages_kept_by_address_are_stale_once_a_service_has_written_them() -> None:
    kept: dict[object, Tensor] = {}

    def attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q):
        cache = tuple(kept.setdefault((each.data_ptr(), each.shape), each.clone()) for each in (key_cache, value_cache))
        return attend(query, cache, block_table, seq_lens, cu_seqlens_q)

    assert judged(from_function(attention, "attention")).grade is CheckVerdict.wrong


@pytest.mark.parametrize("name", ["key_cache", "block_table"])
def test_a_write_into_what_a_service_lends_is_found(name: str) -> None:
    def attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q):
        output = attend(query, (key_cache, value_cache), block_table, seq_lens, cu_seqlens_q)
        {"key_cache": key_cache, "block_table": block_table}[name].fill_(0)
        return output

    found = judged(from_function(attention, "attention"))
    assert found.grade is CheckVerdict.wrong
    assert f"changed its input {name}" in str(found.rules)


@pytest.mark.parametrize(("first", "detail"), [(1, "one key late"), (-1, "one key early"), (16, "whole page")])
def test_a_window_that_begins_elsewhere_is_named(first: int, detail: str) -> None:
    def attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, window_size):
        left = window_size[0]

        def weights(_: Tensor, scores: Tensor, __: int) -> Tensor:
            num_tokens, length = scores.shape[-2:]
            begins = torch.arange(length - num_tokens, length) - left
            begins = -(-begins // first) * first if first > 1 else begins + first
            hidden = torch.arange(length) < begins[:, None]
            return scores.masked_fill(hidden, -math.inf).softmax(dim=-1).nan_to_num(0.0)

        return attend(query, (key_cache, value_cache), block_table, seq_lens, cu_seqlens_q, weights=weights)

    found = judged(from_function(attention, "attention"), WINDOWED)
    assert "window_begins_elsewhere" in found.mistakes, found.diagnosis
    assert detail in str(found.diagnosis)


def test_pools_taken_for_dense_ones_are_named() -> None:
    def attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q):
        cache = tuple(
            each.as_strided(each.shape, torch.empty(each.shape, device="meta").stride())
            for each in (key_cache, value_cache)
        )
        return attend(query, cache, block_table, seq_lens, cu_seqlens_q)

    assert judged(from_function(attention, "attention")).mistakes == ("read_as_contiguous",)


@lru_cache(maxsize=1)
def cells() -> tuple[Workload, ...]:
    return sweep.workloads(sweep.load("check_pages"), {}, ("cpu",))


@pytest.mark.parametrize("name", ["paged_gather", "paged_loop"])
def test_honest_functions_of_pages_are_right_on_every_usual_cell(name: str) -> None:
    known: dict = {}
    honest = implementation(name)
    able = [cell for cell in cells() if honest.unsupported(cell) is None]
    grades = {cell.id: check(references(cell), honest, known).grade for cell in able}
    assert len(able) >= 18
    assert set(grades.values()) == {CheckVerdict.right}, grades


@pytest.mark.parametrize("name", ["sdpa", "fused", "bmm"])
@pytest.mark.parametrize(
    "workload", [MIXED, EIGHT_BITS, SHARED, WINDOWED], ids=["mixed", "8 bits", "shared", "windows"]
)
def test_a_dense_function_is_right_on_gathered_requests(name: str, workload: Workload) -> None:
    assert judged(implementation(name), workload).grade is CheckVerdict.right


def test_usual_cells_have_what_a_service_runs() -> None:
    batches = [each.requests for each in cells()]
    assert any(request.new == 1 for batch in batches for request in batch)
    assert any(1 < request.new < request.total for batch in batches for request in batch)
    assert any(request.total == 0 for batch in batches for request in batch)
    rests = {request.total % each.page_size for each in cells() for request in each.requests}
    assert {0, 1, 15} <= rests
    assert {16, 64, 256} == {each.page_size for each in cells()}
    assert {"float32", "bfloat16", "float16"} == {each.dtype for each in cells()}
    assert any(each.shared_prefix for each in cells())
    assert any(each.requests[0].new > each.shared_prefix > 0 for each in cells())
    assert max(map(len, batches)) > 32
    assert max(request.total for batch in batches for request in batch) > 2**15
    decodes = [batch for batch in batches if all(request.new == 1 for request in batch)]
    assert 3 * len(decodes) >= len(batches)
    assert {"same", "float8_e4m3fn", "float8_e5m2"} == {each.cache_dtype for each in cells()}


def test_every_page_mistake_has_an_explanation_and_changes_an_answer() -> None:
    for workload in (MIXED, EIGHT_BITS, SHARED, WINDOWED):
        reference = references(workload).by_probe["normal"]
        for mistake in page_mistakes(workload):
            assert mistake.words, mistake
            other = reference.answers_of(mistake, has_gradients=False)["output"]
            assert other.shape == reference.expected["output"].shape


def test_a_function_in_another_process_is_judged_on_its_cache(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from attnbench.implementations import paged_loop\n"
        "def attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q):\n"
        "    return paged_loop.attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q)\n"
    )
    assert plugins.discover_implementations(file) == ["attention"]
    assert plugins.reads_pages(f"{file}:attention")
    reply = checked(cell_of(f"{file}:attention", MIXED))
    assert reply.status == "ok", reply.message
    refused = checked(cell_of(f"{file}:attention", EIGHT_BITS))
    assert "name parameters k_scale and v_scale" in refused.message


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"batch": "none", "page_size": 0}, "page_size=16"),
        ({"sinks": "learned"}, "sinks"),
        ({"mask": "sliding_window(9)"}, "window_size"),
        ({"cache_dtype": "float8_e5m2"}, "k_scale"),
    ],
)
def test_what_a_function_of_pages_cannot_be_passed_is_said(axes: dict[str, object], words: str) -> None:
    reason = paged().unsupported(msgspec.structs.replace(MIXED, **axes))
    assert reason is not None
    assert words in reason


def arguments(names: Iterable[str]) -> dict[str, object]:
    """The arguments of a function with these parameters, on the 8-bit cache."""

    def function(**given: object) -> dict[str, object]:
        return given

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    function.__signature__ = inspect.Signature(parameters)
    signature = PageSignature(function=function, spec="function", names=names_of(function))
    inputs = references(EIGHT_BITS).by_probe["normal"].inputs.tensors
    return function(**signature.arguments(*(inputs[name] for name in QKV), bind(EIGHT_BITS)))


@pytest.mark.parametrize(("name", "alias"), [(name, alias) for name, known in PAGED.items() for alias in known])
def test_a_function_gets_an_argument_by_each_of_its_names(name: str, alias: str) -> None:
    usual = arguments(PAGED)
    named = arguments([alias if each == name else each for each in PAGED])
    assert {*usual} == {*PAGED}
    assert {*named} == {*PAGED} - {name} | {alias}
    for own, given in named.items():
        expected = usual[name if own == alias else own]
        if isinstance(given, Tensor):
            assert given.dtype == expected.dtype
            assert torch.equal(bytes_of(given).nan_to_num(), bytes_of(expected).nan_to_num())
        else:
            assert given == expected


def test_the_document_lists_every_name_of_an_argument_and_no_other() -> None:
    names = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("## Names")[2]
    left = [line.split("|")[1] for line in names.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`(\w+)`", "".join(left))
    assert sorted(listed) == sorted(alias for aliases in PAGED.values() for alias in aliases)


def test_a_signature_that_nobody_can_call_is_refused() -> None:
    def without_pool(query, block_table, seq_lens): ...

    def with_more(query, key_cache, value_cache, block_table, seq_lens, workspace): ...

    with pytest.raises(ValueError, match="key_cache/k_cache"):
        from_function(without_pool, "without_pool")
    with pytest.raises(ValueError, match="workspace"):
        from_function(with_more, "with_more")


def test_what_only_very_many_keys_show_is_found_with_few_calls() -> None:
    """Slots counted in 16 bits."""
    calls = []

    def narrow(address: Tensor, *_: Tensor) -> Tensor:
        calls.append(len(address))
        return address.short().long() % 1000 if address.max() > 32767 else address

    long = next(cell for cell in cells() if cell.kv_len > 2**15)
    found = judged(paged(address=narrow), long)
    assert found.grade is CheckVerdict.wrong
    assert len(calls) < 300


def test_without_query_bounds_a_function_decodes_alone() -> None:
    def attention(q, k_cache, v_cache, block_tables, context_lens):
        starts = torch.arange(len(q) + 1)
        return attend(q, (k_cache, v_cache), block_tables, context_lens, starts)

    made = from_function(attention, "attention")
    assert "cu_seqlens_q" in str(made.unsupported(MIXED))
    decode = Workload(batch="q1kv32_q1kv31_q1kv33", page_size=16, **SIZES)
    assert made.unsupported(decode) is None
    assert judged(made, decode).grade is CheckVerdict.right


@pytest.mark.parametrize(
    ("changes", "is_noted"),
    [
        ({}, False),
        ({"weights": lambda weights, scores, request: weights * (1 + 1e-7 * request)}, True),
        ({"length": lambda used, size: -(-used // size) * size}, False),  # it is wrong, which says more
    ],
)
def test_a_request_that_depends_on_its_neighbours_is_noted(changes, is_noted):
    wide = {"wide": lambda _: torch.float64}  # rounded at the end: bits do not depend on addresses
    notes = {rule.rule: rule.found for rule in judged(paged(**wide, **changes)).notes}
    assert ("neighbours" in notes) is is_noted
    assert not is_noted or "apart from the same request in" in notes["neighbours"]


def test_a_request_that_depends_on_the_place_of_its_pages_is_not_said_to_depend_on_others() -> None:
    first = [0]

    def address(address: Tensor, row: Tensor, at: Tensor, pool: Tensor) -> Tensor:
        first[0] = int(row[0])
        return address

    found = judged(paged(address=address, weights=lambda weights, scores, request: weights * (1 + 1e-7 * first[0])))
    assert found.grade is CheckVerdict.right
    assert "neighbours" not in {rule.rule for rule in found.notes}
