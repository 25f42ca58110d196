"""Masks: the rule, the dense form, a tile and the count agree with one another and with the description."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnbench.contract import BoundMask
from attnbench.workloads.masks import Combined, Mask, parse_mask
from attnbench.workloads.workload import Workload
from tests.mask_texts import fits, not_among

SIZES = [(1, 1, 1), (2, 5, 5), (3, 4, 9), (2, 9, 4), (1, 8, 8), (2, 1, 7), (1, 7, 1)]
HEADS = 6


def reported(name: str, sizes: tuple[int, int, int], b: int, i: int, j: int) -> bool:
    """Whether one pair is visible, by the mask's description as code; by its own rule if it has none here."""
    batch, queries, keys = sizes
    rank = (b + 1) % batch  # among the lengths, the longest first
    is_true_key = j < keys - ((rank + 1) * keys) // (2 * batch)
    half = keys - keys // 2
    own = i + keys - queries  # the query's place counted from the end
    first = keys - rank * (keys - max(queries, keys // 4)) // max(1, batch - 1) - queries  # of a row's queries
    words = {
        "causal": j <= i,
        "causal_bottom_right": keys - j >= queries - i,  # as far from the end as the query, or further
        "sliding_window(3)": j in {i, i - 1, i - 2},
        "sliding_window_bottom_right(3)": (keys - j) - (queries - i) in {0, 1, 2},
        "padding": is_true_key,
        "padding_to_nothing": b < batch - 1 and is_true_key,
        "prefix(2)": j in {0, 1} or j <= i,
        "document": (i < half) == (j < half),
        "boolean(0)": j == i % keys,
        "window(1,2)": j in {i - 1, i, i + 1, i + 2},
        "chunks(3)": i // 3 == j // 3,
        "chunks_bottom_right(3)": own // 3 == j // 3,
        "ragged": j <= first + i,
    }
    mask = parse_mask(name)
    return words[name] if name in words else bool(mask.sees(b, i, j, mask.table(*sizes), keys - queries))


@pytest.mark.parametrize("name", ["padding", "ragged"])
@pytest.mark.parametrize("batch", [3, 4, 8])
def test_default_lengths_are_in_no_order_and_sorting_them_exchanges_no_pairs(name, batch):
    lengths = parse_mask(name).lengths(batch, 5, 64)
    order = np.argsort(-lengths)
    assert len({*lengths.tolist()}) == batch
    assert (lengths[order] != lengths).any()
    assert (order[order] != np.arange(batch)).any()


HIDING = ["causal", "causal_bottom_right", "sliding_window(3)", "sliding_window_bottom_right(3)", "padding"]
HIDING += ["padding_to_nothing", "prefix(2)", "document", "boolean(0)"]
SHOWING_ALL = ["none", "boolean(100)", "alibi", "alibi_bottom_right", "additive", "softcap(2)"]
SHOWING_ALL += ["relative_buckets", "relative_buckets_past(4,9)"]
JOINED = ["+".join(pair) for pair in itertools.combinations(HIDING, 2)]
JOINED += ["causal+chunks(3)", "causal+padding+prefix(2)", "padding+softcap(2)+alibi", "softcap(2)+additive"]
GIVEN = [*SHOWING_ALL, *HIDING, "window(1,2)", "chunks(3)", "chunks_bottom_right(3)", "ragged", *JOINED]
EVERY = [*GIVEN, *not_among(GIVEN)]


def dense(name, sizes):
    batch, queries, keys = sizes
    parts = [part for part in name.split("+") if part not in SHOWING_ALL]
    return np.array(
        [
            [[all(reported(part, sizes, b, i, j) for part in parts) for j in range(keys)] for i in range(queries)]
            for b in range(batch)
        ]
    )


@pytest.mark.parametrize("name", EVERY)
def test_dense_form_count_and_tiles_are_what_the_words_say(name):
    mask = parse_mask(name)
    fitting = [sizes for sizes in SIZES if fits(name, sizes)]
    picky = any(word in name for word in ("document", "ragged"))
    assert len(fitting) == len(SIZES) or (picky and fitting)
    for sizes in fitting:
        expected = dense(name, sizes)
        assert (mask.dense(*sizes) == expected).all()
        firsts, lasts, numbers = mask.seen_keys(*sizes)
        assert (numbers == expected.sum(axis=-1)).all()
        assert (firsts == expected.argmax(axis=-1)).all()
        assert (lasts == sizes[2] - 1 - expected[..., ::-1].argmax(axis=-1)).all()
        assert mask.num_visible(*sizes) == expected.sum()
        assert mask.has_empty_rows(*sizes) == (~expected.any(axis=-1)).any()
        rows = np.array([0, sizes[1] - 1])
        assert (mask.dense(*sizes, rows=rows) == expected[:, rows]).all()
        bound = BoundMask(mask, sizes, "cpu", num_heads=HEADS)
        assert (bound.visible is None) == (not mask.hides)
        full = torch.ones(1, dtype=torch.bool) if bound.visible is None else bound.visible
        assert (full.expand(sizes[0], 1, *sizes[1:]).squeeze(1).numpy() == expected).all()
        if bound.visible is not None:
            assert not (bound.visible & bound.hidden).any()


def test_a_count_in_blocks_is_that_of_the_whole(monkeypatch):
    mask = parse_mask("boolean(30)")
    whole = mask.seen_keys(2, 9, 5)
    monkeypatch.setattr("attnbench.workloads.masks.COUNTED_AT_ONCE", 20)
    assert np.array_equal(mask.seen_keys(2, 9, 5), whole)


def test_a_long_count_needs_no_dense_form():
    length = 2**20  # the dense form would be a terabyte
    assert parse_mask("causal+sliding_window(3)").num_visible(1, length, length) == 3 * length - 3
    assert parse_mask("document(3,0,2)").num_visible(2, 5, 5) == 2 * (9 + 4)


class TestDrawn:
    def test_a_boolean_mask_shows_its_share_in_every_row_head_and_column(self):
        seen = parse_mask("boolean(30)").dense(4, 200, 300)
        for axis in (0, 1, 2):
            others = tuple({0, 1, 2} - {axis})
            assert np.abs(seen.mean(axis=others) - 0.3).max() < 0.1
        assert abs(seen.mean() - 0.3) < 0.01

    def test_batch_rows_queries_and_seeds_differ(self):
        seen = parse_mask("boolean(50)").dense(3, 64, 64)
        rows = {row.tobytes() for row in seen.reshape(-1, 64)}
        assert len(rows) == 3 * 64
        assert (parse_mask("boolean(50,1)").dense(3, 64, 64) != seen).mean() > 0.4
        assert (parse_mask("boolean(50,0)").dense(3, 64, 64) == seen).all()

    def test_an_additive_bias_differs_by_head_query_and_key_and_is_rounded_once(self):
        bound = BoundMask(parse_mask("additive"), (2, 64, 64), "cpu", num_heads=8)
        bias = bound.added(torch.float64)
        assert bias.shape == (1, 8, 64, 64)
        assert -4 <= bias.min() < -3.9
        assert 3.9 < bias.max() < 4
        assert abs(float(bias.mean())) < 0.1
        rows = {row.numpy().tobytes() for row in bias[0].flatten(0, 1)}
        assert len(rows) == 8 * 64
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert bound.added(dtype).dtype is dtype
            assert (bound.added(dtype) == bias.to(dtype)).all()
        assert (bound.added(torch.float32).double() == bias).all()


def test_numbers_to_add_are_made_once_and_only_where_there_are_some():
    bound = BoundMask(parse_mask("causal+alibi"), (2, 4, 6), "cpu", num_heads=2)
    assert bound.added(torch.float32) is bound.added(torch.float32)
    for name in ("none", "softcap(2)"):
        assert BoundMask(parse_mask(name), (2, 4, 6), "cpu", num_heads=2).added(torch.float32) is None


@given(st.permutations(["causal", "padding(3,4)", "softcap(20)", "alibi"]))
def test_a_combination_has_one_text_but_for_the_order_of_changes(parts):
    mask = parse_mask(" + ".join(parts))
    changes = [part for part in parts if part in {"softcap(20)", "alibi"}]
    assert str(mask) == "+".join(["causal", "padding(3,4)", *changes])
    assert str(parse_mask(str(mask))) == str(mask)
    assert mask.name == str(mask).replace("(3,4)", "").replace("(20)", "")
    assert isinstance(mask, Combined)


def test_ids_of_combinations_are_apart_and_fit_for_a_path():
    names = ["causal+softcap(20)", "causal", "softcap(20)", "softcap(20)+alibi", "alibi+softcap(20)"]
    ids = {Workload(mask=name).id for name in names}
    assert len(ids) == len(names)
    assert not any(set(each) & set("+(), ") for each in ids)


NONSENSE = ["", "causal(", "causal;drop", "padding(1,x)", "__import__", "+", "causal+", "causal++alibi", "none+causal"]
NONSENSE += ["causal+causal", "padding+padding(3)", "causal(3)", "causal+softcap", "softcap(-1)"]
MISFITS = ["softcap(0)", "sliding_window(0)", "boolean(101)", "causal+padding(3,4)"]


@pytest.mark.parametrize("text", [*NONSENSE, *MISFITS])
def test_nonsense_and_arguments_that_do_not_fit_are_refused_in_one_line(text):
    with pytest.raises(
        ValueError, match="is not allowed: write it as" if text in MISFITS else "is not allowed"
    ) as refused:
        Workload(mask=text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["padding(3,4)", "document(3,5)", "sliding_window(3)", "causal+padding(3,4)+alibi"])
@pytest.mark.parametrize("length", [2, 8, 33])
def test_a_mask_can_be_taken_to_another_length(name, length):
    other = parse_mask(name).at_other_length()
    other.check(2, length, length)
    assert isinstance(other, Mask)
    assert other.name == parse_mask(name).name


@given(st.sampled_from(["sliding_window", "prefix", "softcap", "boolean", "additive"]), st.integers(1, 99))
def test_text_and_mask_are_inverse(name, number):
    assert str(parse_mask(f" {name} ( {number} ) ")) == f"{name}({number})"
