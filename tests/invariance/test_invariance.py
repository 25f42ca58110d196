"""Laws of invariance: kernels that split their keys by the sizes of the call are found, others pass."""

import dataclasses

import pytest
import torch

from attnbench.contract.functions import from_function
from attnbench.invariance.laws import EXAMPLE, LAWS, LAWS_OF_REQUESTS, example, tried
from attnbench.processes.one_off_tasks import shapes
from attnbench.workloads.workload import Workload

SHAPE = Workload(seq_len=40, num_heads=4, num_kv_heads=2, head_dim=4, mask="causal", direction="inference")


def in_parts(query, key, value, mask, scale, number):
    """Attention that sums its keys one by one, in `number` parts that are joined at the end.

    Every step is elementwise, so that only the number of parts decides the order of the sums.
    """
    seen = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool) if mask is None else mask
    seen = seen.expand(len(query), 1, query.shape[2], key.shape[2])
    totals, sums = [], []
    size = -(-key.shape[2] // number)
    for start in range(0, key.shape[2], size):
        total = torch.zeros(*query.shape[:3], 1)
        summed = torch.zeros(*query.shape[:3], value.shape[-1])
        for place in range(start, min(start + size, key.shape[2])):
            score = torch.zeros(*query.shape[:3], 1)
            for column in range(query.shape[-1]):
                score = score + query[..., column, None] * key[:, :, place, column, None, None]
            power = (score * scale).double().exp().float() * seen[..., place, None]  # the same lanes and rounding
            total, summed = total + power, summed + power * value[:, :, place, None]
        totals.append(total)
        sums.append(summed)
    return sum(sums[1:], sums[0]) / sum(totals[1:], totals[0])


def split_by(number_of):
    def mine(query, key, value, *, mask=None, scale=None):
        return in_parts(query, key, value, mask, scale, number_of(query, key))

    return from_function(mine, "mine")


def laws(implementation, shape=SHAPE):
    return {law.law: law for law in tried(implementation, shape, 0)}


def broken(found):
    return {name for name, law in found.items() if law.broken}


def test_one_that_adds_in_one_order_keeps_every_law():
    found = laws(split_by(lambda query, key: 1))
    assert broken(found) == set(), found
    assert all(law.num_tried for law in found.values()), found
    assert set(found) == set(LAWS)


PLANTED = {
    "by the batch": (lambda query, key: max(1, 8 // len(query)), {"batch size", "ragged batch"}),
    "by the queries": (lambda query, key: 4 if query.shape[2] == 1 else 1, {"prefill, chunks, decode"}),
    "by a block of queries": (lambda query, key: 1 + query.shape[2] // 16, {"prefill, chunks, decode"}),
    "by the length": (lambda query, key: 1 + key.shape[2] // 32, {"padding", "ragged batch"}),
    "by the heads": (lambda query, key: max(1, 4 // query.shape[1]), {"heads"}),
    "to fill the machine": (
        lambda query, key: max(1, 32 // (query.shape[0] * query.shape[1])),
        {"batch size", "heads"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_keys_that_are_split_by_the_sizes_of_the_call_are_found(name):
    number_of, expected = PLANTED[name]
    found = broken(laws(split_by(number_of)))
    assert expected <= found, found


def test_what_is_drawn_again_is_found_from_run_to_run():
    def noisy(query, key, value, *, mask=None, scale=None):
        return in_parts(query, key, value, mask, scale, 1) * (1 + 1e-6 * torch.rand(1))

    found = laws(from_function(noisy, "noisy"))
    assert "run to run" in broken(found)
    assert "of the numbers differ" in found["run to run"].broken


def test_what_cannot_be_tried_says_why_and_what_fails_is_no_certificate():
    def without_mask(query, key, value): ...

    def failing(query, key, value, *, mask=None):
        raise RuntimeError("no")

    found = laws(from_function(without_mask, "without_mask"))
    assert all(law.reason or law.broken for law in found.values())
    assert broken(laws(from_function(failing, "failing"))) == set(LAWS)


def test_the_first_difference_names_the_place_and_both_numbers():
    found = laws(split_by(lambda query, key: 3 if len(query) == 3 else 1))["batch size"]
    assert found.broken.startswith("batch 3, prefill: ")
    assert "first at sequence 0, head 0, query" in found.broken
    assert ", not " in found.broken


REQUESTS = SHAPE.with_axes(EXAMPLE | {"batch": "q20kv90_2q1kv61_q1kv33_q7"})


def paged_in_parts(parts_of):
    """Decoding over pages, whose keys are summed in as many parts as `parts_of(lengths, row, table)` says."""

    def mine(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, softmax_scale):
        outputs = []
        for row, length in enumerate(seq_lens.tolist()):
            tokens = query[cu_seqlens_q[row] : cu_seqlens_q[row + 1]].transpose(0, 1)[None]
            pages = block_table[row].long()
            keys, values = (pool[pages].flatten(0, 1)[:length].transpose(0, 1) for pool in (key_cache, value_cache))
            keys, values = (each.repeat_interleave(2, dim=0)[None] for each in (keys, values))
            seen = torch.ones(tokens.shape[2], length, dtype=torch.bool).tril(length - tokens.shape[2])[None, None]
            number = parts_of(seq_lens, row, block_table)
            outputs.append(in_parts(tokens, keys, values, seen, softmax_scale, number)[0].transpose(0, 1))
        return torch.cat(outputs)

    return from_function(mine, "mine")


OF_REQUESTS = {
    "by the longest request": (lambda lengths, row, table: 1 + int(lengths.max()) // 64, {"neighbours"}),
    "by the place in the batch": (lambda lengths, row, table: 1 + row, {"neighbours", "order of requests"}),
    "by the pages": (lambda lengths, row, table: 1 + int(table[row, 0]) % 3, {"place of pages"}),
    "by nothing": (lambda lengths, row, table: 1, set()),
}


@pytest.mark.parametrize("name", OF_REQUESTS)
def test_requests_that_depend_on_their_neighbours_are_found(name):
    parts_of, expected = OF_REQUESTS[name]
    found = laws(paged_in_parts(parts_of), REQUESTS)
    assert set(found) == set(LAWS_OF_REQUESTS)
    assert expected <= broken(found), found
    assert expected or not broken(found), found
    assert all(law.num_tried for law in found.values())


def test_one_request_has_no_neighbours_and_gathered_keys_have_no_pages():
    alone = laws(paged_in_parts(lambda lengths, row, table: 1), REQUESTS.with_axes({"batch": "q9kv40"}))
    assert {name for name, law in alone.items() if law.reason} == {"neighbours", "order of requests"}
    gathered = laws(split_by(lambda query, key: 1), REQUESTS)
    assert gathered["place of pages"].reason == "it gets no pages"
    assert not broken(gathered)


def test_a_shared_prefix_stays_where_several_requests_are_called():
    """A kernel may compute it once, in another order."""
    seen = []

    def mine(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q):
        seen.append((len(seq_lens), len(set(block_table[:, 0].tolist()))))
        return query

    batch = REQUESTS.with_axes({"batch": "q1kv61_q2kv40_q1kv33", "shared_prefix": 16})
    assert not broken(laws(from_function(mine, "mine"), batch))
    assert {first for number, first in seen if number > 1} == {1}


def test_a_function_of_pages_gets_an_example_with_long_requests():
    mine = paged_in_parts(lambda lengths, row, table: 1)
    shape = SHAPE.with_axes({"rotary": "halves(10000)"})
    found = example(mine, shape)
    assert (found.batch, found.page_size, found.num_heads) == (EXAMPLE["batch"], 16, SHAPE.num_heads)
    large = dataclasses.replace(mine, unsupported=lambda each: "large pages only" if each.page_size < 256 else None)
    assert example(large, shape).page_size == 256
    assert example(split_by(lambda query, key: 1), shape) == shape
    assert shapes((REQUESTS, REQUESTS, SHAPE)) == [REQUESTS, *shapes((SHAPE,))]
