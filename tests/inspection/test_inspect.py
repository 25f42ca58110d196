"""An inspection: its steps equal the oracle's, and its pictures are complete."""

import numpy as np
import pytest
import torch

from attnbench.checking import oracle
from attnbench.checking.diagnosis import recover_weights
from attnbench.inspection import walkthrough
from attnbench.inspection.oracle_diff import look

TIME, FRUIT = "time flies like an arrow", "fruit flies like a banana"
CAPPED = ("mask=causal+softcap(2)+alibi",)
GROUPED = ("num_heads=4", "num_kv_heads=2", "value_dim=3")


@pytest.mark.parametrize("settings", [(), GROUPED, ("mask=none",), ("mask=sliding_window(2)", "embed_dim=12"), CAPPED])
def test_each_step_is_the_oracles(settings):
    point = walkthrough.workload(5, settings, seed=3)
    walk = walkthrough.walk(tuple(TIME.split()), point)
    given = walk.inputs
    x = given.tensors["x"]
    query, key, value = oracle.project(x, x, given.weights)
    under = oracle.row_mask(point, torch.arange(5))

    def attend(values):
        return oracle.attend(query, key, values, under)

    expected = {
        "x": x,
        "query": query,
        "key": key,
        "value": value,
        "weights": recover_weights(attend, value),
        "context": attend(value),
        "output": oracle.answer(point, given, torch.arange(5)),
    }
    for name, tensor in expected.items():
        np.testing.assert_allclose(walk.steps[name], tensor.numpy(), rtol=1e-12, atol=1e-14)
    scores, masked = walk.steps["scores"], walk.steps["masked scores"]
    hidden = ~np.broadcast_to(under.seen.numpy(), scores.shape)
    assert (masked[hidden] == -np.inf).all()
    assert (masked[~hidden] == scores[~hidden]).all() == (not point.mask_rule.changes_scores)


def test_a_word_is_the_same_vector_in_every_sentence_and_differs_with_the_seed():
    point = walkthrough.workload(5, (), seed=0)
    first, second = (walkthrough.inputs(reported.split(), point).tensors["x"][0] for reported in (TIME, FRUIT))
    assert torch.equal(first[1], second[1])  # flies
    assert not torch.equal(first[0], second[0])
    other = walkthrough.inputs(TIME.split(), walkthrough.workload(5, (), seed=1))
    assert not torch.equal(first, other.tensors["x"][0])


@pytest.mark.parametrize(
    ("sentences", "settings", "said"),
    [
        ([" "], [], "has no words"),
        (["w " * 25], [], "is too long to look at"),
        (["a"] * 5, [], "too many to look at"),
        ([TIME], ["nmu_heads=3"], "did you mean num_heads?"),
        ([TIME], ["seq_len=3"], "seq_len is not for inspect"),
        ([TIME], ["num_heads=3", "embed_dim=8"], "divisors of embed_dim"),
        ([TIME], ["num_heads=2,4"], "takes one value"),
        ([TIME], ["num_heads=9"], "at most 8 heads"),
        ([TIME], ["mask=padding(9)"], "with one length for each batch row"),
    ],
)
def test_wrong_usage_says_what_is_allowed(sentences, settings, said):
    with pytest.raises(ValueError, match=said):
        look("fused", sentences, settings)
