"""Small errors are named: a scale or a temperature; others stay unknown. Long workloads are diagnosed as well."""

from itertools import pairwise

import pytest
import torch

from attnbench.checking import steps
from attnbench.checking.agreement import check
from attnbench.checking.diagnosis import Evidence, cut, gather, match, visible_keys
from attnbench.checking.mistakes import catalogue
from attnbench.checking.oracle import product
from attnbench.checking.reference import reference_for_probe
from attnbench.checking.steps import Mistake
from attnbench.workloads.workload import Workload
from studies.detection.planted import implementation
from tests.checks import references

PLAIN = Workload(batch_size=2, seq_len=37, num_heads=2, head_dim=16, direction="inference")
CAUSAL = Workload(seq_len=37, num_heads=3, head_dim=16, mask="causal", direction="forward_backward")
MODULE = Workload(seq_len=37, num_heads=2, head_dim=16, scope="module", direction="forward_backward")
WORKLOADS = [PLAIN, CAUSAL, MODULE]


def changed(**changes):
    """Build the textbook form with these steps replaced."""
    named = {name.replace("_", " "): change for name, change in changes.items()}
    return implementation(Mistake(name="planted", step=next(iter(named)), words="", changes=named))


def diagnosed(point, **changes):
    found = check(references(point), changed(**changes))
    assert not found.agrees
    return found


def quantised(tensor):
    """Round to 8 bits; gradients pass unchanged."""
    step = tensor.detach().abs().amax() / 127
    return tensor + ((tensor / step).round() * step - tensor).detach()


def noise(weights, value, mask):
    made = product(weights, value)
    return made + 0.002 * torch.randn(made.shape, generator=torch.Generator().manual_seed(7)).to(made.dtype)


def no_small(weights, value, mask):
    return product(weights * (weights > 0.005), value)


UNKNOWN = {
    "noise": {"context": noise},
    "keys of 8 bits": {"scores": lambda query, key, mask: steps.scores(query, quantised(key), mask)},
    "small weights left out": {"context": no_small},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("point", WORKLOADS, ids=lambda point: point.id)
@pytest.mark.parametrize("factor", [1.01, 0.999, -1.0, 1.3])
def test_a_scale_of_the_output_is_named_with_its_number(point, factor):
    found = diagnosed(point, context=lambda weights, value, mask: factor * product(weights, value))
    assert found.mistakes == ("output_factor",)
    assert f"{factor:g} times what it should be" in found.diagnosis


@pytest.mark.one_in(2)
@pytest.mark.parametrize("point", [PLAIN, CAUSAL], ids=lambda point: point.id)
@pytest.mark.parametrize("factor", [1.001, 0.9, 1.5])
def test_a_temperature_of_the_softmax_is_named_with_its_number(point, factor):
    found = diagnosed(point, scores=lambda query, key, mask: factor * steps.scores(query, key, mask))
    assert found.mistakes == ("scores_scaled",)
    assert f"the scores are {factor:g} times" in found.diagnosis
    assert found.step == "scores"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("point", WORKLOADS, ids=lambda point: point.id)
@pytest.mark.parametrize("changes", UNKNOWN.values(), ids=UNKNOWN)
def test_an_error_that_no_mistake_makes_is_not_called_one(point, changes):
    found = diagnosed(point, **changes)
    assert found.mistakes == ()
    assert "No known mistake explains it" in found.diagnosis
    assert "dropout" not in found.diagnosis


def test_random_noise_is_called_random_and_not_dropout():
    draws = torch.Generator().manual_seed(0)  # its own generator: the check watches torch's

    def another_each_time(weights, value, mask):
        return product(weights, value) + 0.01 * torch.randn((), generator=draws)

    found = diagnosed(PLAIN, context=another_each_time)
    assert "Something random is active" in found.diagnosis
    assert found.mistakes == ()


def unscaled(query, key, mask):
    return product(query, key.transpose(-2, -1))


def test_a_long_workload_is_diagnosed_at_a_short_one_with_fewer_heads_and_batch_rows():
    point = Workload(batch_size=4, seq_len=128, num_heads=8, num_kv_heads=4, head_dim=8, direction="inference")
    references = {"normal": reference_for_probe(point, "normal", 0)}
    (short,) = gather(changed(scores=unscaled), references, 0)
    made = short.reference.workload
    assert (made.batch_size, made.seq_len, made.num_heads, made.num_kv_heads) == (2, 67, 4, 2)

    def only_the_long(weights, value, mask):
        return product(weights, value) * (2 if weights.shape[-1] > 100 else 1)

    (long,) = gather(changed(context=only_the_long), references, 0)
    assert long.reference.workload == point


def test_where_rows_are_chosen_the_worst_and_some_others_are():
    point = Workload(seq_len=300, num_heads=4, head_dim=4, direction="inference")

    def one_row(weights, value, mask):
        made = product(weights, value).clone()
        made[:, :, 123] += 1
        return made

    evidence = Evidence(changed(context=one_row), reference_for_probe(point, "normal", 0))
    cut([evidence])
    rows = evidence.rows.tolist()
    assert 123 in rows
    assert {0, 299} <= set(rows)
    assert len(rows) < 300
    assert all(before < after for before, after in pairwise(rows))
    assert match([evidence], catalogue(evidence.reference.workload)) == []


def test_a_tile_that_is_lost_only_at_a_long_length_is_named_in_training_too():
    def far_tile_lost(query, key, mask):
        scores = steps.scores(query, key, mask)
        return scores.masked_fill((mask.keys >= 64) & (mask.keys < 128), -torch.inf) if len(mask.keys) > 100 else scores

    point = Workload(seq_len=300, num_heads=2, head_dim=8, direction="forward_backward")
    found = diagnosed(point, scores=far_tile_lost)
    assert "tile_dropped" in found.mistakes
    assert "64 keys 64 to 127" in found.diagnosis


@pytest.mark.parametrize(
    ("queries", "keys", "words"),
    [
        (slice(0, 16), slice(16, 32), "hidden keys are seen by queries 0 to 15: 16 to 31"),
        (slice(3, 4), slice(9, 10), "hidden keys are seen by query 3: 9"),
    ],
)
def test_hidden_keys_that_are_seen_are_named(queries, keys, words):
    right = torch.ones(40, 40, dtype=torch.bool).tril()
    seen = right.clone()
    seen[queries, keys] = True
    assert visible_keys(seen, right) == words


def test_keys_that_are_missed_are_named_too():
    right = torch.ones(40, 40, dtype=torch.bool).tril()
    seen = right.clone()
    seen[32:, :8], seen[0, 5] = False, True
    found = visible_keys(seen, right)
    assert found == "hidden keys are seen by query 0: 5; visible keys are missed by queries 32 to 39: 0 to 7"
