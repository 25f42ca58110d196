"""Masks: the rule, the dense form, a tile and the count all say the same, and that is what the words say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.contract import BoundMask
from harness.mask import Mask, masks, parse_mask

SIZES = [(1, 1, 1), (2, 5, 5), (3, 4, 9), (2, 9, 4), (1, 8, 8)]


def told(name: str, sizes: tuple[int, int, int], b: int, i: int, j: int) -> bool:  # noqa: PLR0911 - one each
    """Each mask once more, as a sentence about one pair."""
    batch, queries, keys = sizes
    match name:
        case "none":
            return True
        case "causal":
            return j <= i
        case "causal_bottom_right":
            return keys - j >= queries - i  # as far from the end as the query, or further
        case "sliding_window(3)":
            return j in {i, i - 1, i - 2}
        case "padding":
            return j < keys - ((b + 1) * keys) // (2 * batch)
        case "padding_to_nothing":
            return b < batch - 1 and told("padding", sizes, b, i, j)
        case "prefix(2)":
            return j in {0, 1} or j <= i
        case "document":
            half = keys - keys // 2
            return (i < half) == (j < half)
    raise AssertionError(name)


BOOLEAN = ["none", "causal", "causal_bottom_right", "sliding_window(3)", "padding", "padding_to_nothing"]
BOOLEAN += ["prefix(2)", "document"]


@pytest.mark.parametrize("name", BOOLEAN)
@pytest.mark.parametrize("sizes", SIZES)
def test_dense_form_count_and_tiles_are_what_the_words_say(name, sizes):
    if name == "document" and sizes[1] != sizes[2]:
        pytest.skip("document needs kv_len == seq_len")
    mask = parse_mask(name)
    expected = np.array(
        [[[told(name, sizes, b, i, j) for j in range(sizes[2])] for i in range(sizes[1])] for b in range(sizes[0])]
    )
    assert (mask.dense(*sizes) == expected).all()
    assert mask.num_visible(*sizes) == expected.sum()
    assert mask.has_empty_rows(*sizes) == (~expected.any(axis=-1)).any()
    rows = np.array([0, sizes[1] - 1])
    assert (mask.dense(*sizes, rows=rows) == expected[:, rows]).all()
    bound = BoundMask(mask, sizes, "cpu")
    full = torch.ones(1, dtype=torch.bool) if bound.visible is None else bound.visible
    assert (full.expand(sizes[0], 1, *sizes[1:]).squeeze(1).numpy() == expected).all()
    if bound.visible is not None:
        assert bound.hidden is not None
        assert not (bound.visible & bound.hidden).any()
        tile = bound.tile(slice(0, 1), slice(sizes[2] - 1, sizes[2]))
        assert tile is not None
        assert (tile.expand(sizes[0], 1, 1, 1).flatten().numpy() == expected[:, 0, -1]).all()


def test_every_mask_is_covered_here_or_changes_scores():
    named = {str(parse_mask(name).name) for name in BOOLEAN}
    assert named | {name for name, mask in masks().items() if mask.changes_scores} == set(masks())


@given(st.sampled_from(["sliding_window", "prefix", "softcap"]), st.integers(1, 99))
def test_text_and_mask_are_inverse(name, number):
    assert str(parse_mask(f" {name} ( {number} ) ")) == f"{name}({number})"


@pytest.mark.parametrize("text", ["", "causal(", "causal;drop", "padding(1,x)", "__import__"])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match="mask"):
        parse_mask(text)


@pytest.mark.parametrize("name", ["padding(3,4)", "document(3,5)", "sliding_window(3)"])
@pytest.mark.parametrize("length", [2, 8, 33])
def test_a_mask_can_be_taken_to_another_length(name, length):
    other = parse_mask(name).at_other_length()
    other.check(2, length, length)
    assert isinstance(other, Mask)
