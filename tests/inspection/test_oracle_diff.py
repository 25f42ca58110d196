"""An implementation compared with the oracle step by step: the first difference is the mistake, described in words."""

import html
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from attnbench.checking import steps
from attnbench.checking.mistakes import catalogue
from attnbench.contract import Attention, Implementation
from attnbench.inspection import oracle_diff, text, walkthrough
from attnbench.inspection.oracle_diff import look
from studies.detection.planted import at_rows

TIME, FRUIT = "time flies like an arrow", "fruit flies like a banana"
GROUPED = ("num_heads=4", "num_kv_heads=2", "value_dim=3")
SLIPS = Path(__file__).with_name("slips.py")


def found_in(name, *sentences, settings=()):
    return look(f"{SLIPS}:{name}", sentences or [TIME], settings)


def shown(found, width=100):
    file = io.StringIO()
    text.write(found, Console(width=width, file=file))
    return file.getvalue()


def planted(changes):
    """Build the textbook form with some steps changed."""

    class Planted(Attention):
        def __init__(self, weights):
            super().__init__(weights)
            self.canonical = weights

        def project(self, x, context):
            return {**steps.DEFAULTS, **changes}["projection"](x, context, self.canonical)

        def attend(self, query, key, value, mask):
            rows = at_rows(mask, torch.arange(query.shape[2]))
            return steps.attend(query, key, value, rows, changes)["context"]

        def forward(self, x, context=None, *, mask):
            attended = self.attend(*self.project(x, x if context is None else context), mask)
            return {**steps.DEFAULTS, **changes}["output"](attended, self.canonical)

    return Implementation(build=Planted, source="")


def test_an_error_beyond_what_honest_code_shows_counts_as_in_a_check() -> None:
    """It is less than 1e-5 of the largest value, and more than ten times the error of an honest float32 form."""
    (diff,) = found_in("slightly_large").diffs
    (context,) = (each for each in diff.comparisons if each.name == "context")
    assert not context.agrees
    assert context.largest > 2 * context.tolerance
    (diff,) = found_in("right").diffs
    assert all(each.agrees for each in diff.comparisons)
    assert all(each.largest < each.tolerance / 2 for each in diff.comparisons)


SEEN_AT = {
    "projection": {"projection"},
    "heads": {"weights", "context"},
    "scores": {"weights"},
    "masked scores": {"weights"},
    "weights": {"weights"},
    "context": {"weights", "context"},
    "output": {"output"},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("settings", [(), ("mask=none",), GROUPED], ids=["causal", "none", "grouped"])
def test_a_planted_mistake_is_seen_at_its_own_step(settings):
    words = tuple(TIME.split())
    point = walkthrough.workload(len(words), settings, seed=0)
    walk = walkthrough.walk(words, point)
    seen = set()
    for each in catalogue(point):
        if each.is_gradient:
            continue
        found = oracle_diff.compare(planted(each.changes), walk)
        last = found.comparisons[-1]
        if last.agrees:  # these words cannot distinguish it: that needs the check's probes
            continue
        assert found.first is not None
        assert found.first.step in SEEN_AT[each.step], each.words
        seen.add(each.name)
    assert {"no_scale", "scaled_by_width", "softmax_over_queries", "not_normalised"} <= seen
    if not settings:
        assert {"projections_in_wrong_order", "no_input_biases", "query_key_swapped"} <= seen


def test_the_right_form_agrees_in_every_step():
    for settings in ((), GROUPED, ("mask=none", "value_dim=2")):
        words = tuple(TIME.split())
        point = walkthrough.workload(5, settings, seed=0)
        found = oracle_diff.compare(planted({}), walkthrough.walk(words, point))
        assert [each.name for each in found.comparisons] == ["query", "key", "value", "weights", "context", "output"]
        assert all(each.agrees for each in found.comparisons)


def test_the_first_difference_is_reported_with_its_words():
    found = found_in("no_scale")
    (line,) = text.first_difference(found)
    assert line.startswith("weights: first difference, head ")
    first = found.diffs[0].first
    _, head, row, column = first.place
    words = TIME.split()
    assert f"head {head}, query '{words[row]}', key '{words[column]}'" in line
    here, right = first.values_there()
    assert abs(here - right) == first.largest
    assert f"{here:.4g}, the oracle says {right:.4g}" in line
    assert f"[{here:.2f}]" in shown(found)
    assert line in shown(found)
    assert "(word " in text.first_difference(found_in("no_scale", "a b b a"))[0]  # a word that stands twice


def test_a_wrong_projection_is_seen_first_and_attention_is_judged_apart():
    (found,) = found_in("Swapped").diffs
    right = {each.name: each.agrees for each in found.comparisons}
    assert found.first.name == "query"
    assert right["weights"] and right["context"] and right["value"]  # noqa: PT018
    assert not right["output"]


def test_projections_inside_a_forward_of_its_own_are_not_asked_for():
    for name in ("module_list", "torch_mha"):
        (found,) = look(name, [TIME]).diffs
        assert "its projections cannot be seen" in found.unseen
        assert found.comparisons[-1].name == "output"
        assert all(each.agrees for each in found.comparisons)


def test_an_order_of_its_own_is_no_difference_where_the_output_is_right():
    found = found_in("Own")
    assert not found.differs
    assert [each.name for each in found.diffs[0].comparisons] == ["value", "weights", "context", "output"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "step", "said"),
    [
        ("raising", "context", "it raised RuntimeError: out of <ideas> [31m (slips.py, line 22)"),
        ("leaving", "context", "it raised SystemExit: 0"),
        ("nan", "weights", "nan, the oracle says"),
        (
            "transposed",
            "context",
            "returned (1, 5, 2, 4): it must return one tensor (B, H, T, V), here (1, 2, 5, 4) (heads and",
        ),
        ("nothing", "context", "returned a NoneType: it must return one tensor (B, H, T, V), here (1, 2, 5, 4)"),
        ("whole", "context", "of int64; it should be"),
        ("Unbuildable", "output", "it cannot be built: KeyError"),
    ],
)
def test_what_goes_wrong_is_reported_in_words(name, step, said, tmp_path):
    found = found_in(name)
    assert found.differs
    assert found.diffs[0].first.step == step
    assert said in text.first_difference(found)[0]
    assert said in shown(found)
    assert said in html.unescape(text.write_page(found, tmp_path).read_text(encoding="utf-8"))


def test_a_workload_that_is_unsupported_is_not_compared():
    found = found_in("unmasked")
    assert not found.is_checked
    assert "try --set mask=none" in shown(found)
    assert not found_in("unmasked", settings=["mask=none"]).differs
