"""Laws of invariance: kernels that split their keys by the sizes of the call are found, others pass."""

import pytest
import torch

from attnbench.contract.functions import from_function
from attnbench.invariance.laws import LAWS, Subject, tried
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


def laws(implementation):
    return {law.law: law for law in tried(Subject(implementation, SHAPE, 0))}


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
