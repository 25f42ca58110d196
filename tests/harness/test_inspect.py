"""An inspection: its steps are the oracle's, it finds the first difference, and it shows what it says."""

import html
import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from harness import oracle, steps
from harness.contract import Attention, Implementation
from harness.inspection import beside, look, page, sentence, softness, summary, tables, text
from harness.inspection.found import Outcome
from harness.mistakes import catalogue
from harness.steps import Scene
from tests.harness.test_cli import attnbench

FACTS = json.loads((Path(__file__).parents[1] / "tutorials" / "facts.json").read_text(encoding="utf-8"))
TIME, FRUIT = "time flies like an arrow", "fruit flies like a banana"
GROUPED = ("num_heads=4", "num_kv_heads=2", "value_dim=3")
EVIL = 'fruit <script>alert(1)</script> "quoted" & \x1b[31mred [bold]not[/bold]'
MODULE = '''"""Modules with one mistake each."""

import torch

from harness.contract import Attention


def no_scale(query, key, value, *, mask=None):
    scores = query @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ value


def right(query, key, value, *, mask=None):
    return no_scale(query / query.shape[-1] ** 0.5, key, value, mask=mask)


def raising(query, key, value, *, mask=None):
    raise RuntimeError("out of <ideas>")


def leaving(query, key, value, *, mask=None):
    print("not for standard output")
    raise SystemExit(0)


def nan(query, key, value, *, mask=None):
    return torch.full_like(query, float("nan"))


def transposed(query, key, value, *, mask=None):
    return right(query, key, value, mask=mask).transpose(1, 2)


def nothing(query, key, value, *, mask=None):
    return None


def whole(query, key, value, *, mask=None):
    return right(query, key, value, mask=mask).long()


def unmasked(query, key, value):
    return right(query, key, value)


class Swapped(Attention):
    """Keys before queries."""

    def project(self, x, context):
        query, key, value = super().project(x, context)
        return key, query, value

    def attend(self, query, key, value, mask):
        return right(query, key, value, mask=mask.visible)


class Own(Swapped):
    """Another order inside, and right in the end."""

    def forward(self, x, context=None, *, mask):
        key, query, value = self.project(x, x)
        return self.out(self.attend(query, key, value, mask).transpose(1, 2).flatten(2))


class Unbuildable(Attention):
    def __init__(self, weights):
        raise KeyError("lost")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("theirs")
    (made / "theirs.py").write_text(MODULE)
    (made / "broken.py").write_text("import nothing_of_this_name\ndef f(query, key, value): ...\n")
    return made


def found_in(folder, name, *sentences, settings=()):
    return look.look(f"{folder / 'theirs.py'}:{name}", sentences or [TIME], settings)


def shown(found, width=100):
    file = io.StringIO()
    text.write(found, Console(width=width, file=file))
    return file.getvalue()


# ------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("settings", [(), GROUPED, ("mask=none",), ("mask=sliding_window(2)", "embed_dim=12")])
def test_each_step_is_the_oracles(settings):
    point = sentence.workload(5, settings, seed=3)
    given = sentence.inputs(TIME.split(), point)
    walk = look.walk(tuple(TIME.split()), point, given)
    x = given.tensors["x"]
    query, key, value = oracle.project(x, x, given.weights)
    seen = oracle.seen_rows(point, torch.arange(5))

    def attend(values):
        return oracle.attend(query, key, values, seen)

    expected = {
        "x": x,
        "query": query,
        "key": key,
        "value": value,
        "weights": beside.revealed(attend, value),
        "context": attend(value),
        "output": oracle.answer(point, given, torch.arange(5)),
    }
    for name, tensor in expected.items():
        np.testing.assert_allclose(walk.step(name).values, tensor.numpy(), rtol=1e-12, atol=1e-14)
    scores, masked = walk.step("scores").values, walk.step("masked scores").values
    hidden = ~np.broadcast_to(seen.numpy()[:, None], scores.shape)
    assert (masked[hidden] == -np.inf).all()
    assert (masked[~hidden] == scores[~hidden]).all()
    np.testing.assert_allclose(np.log(walk.step("weights").values[~hidden]).max(), 0.0, atol=5)


def test_shapes_are_told_with_letters():
    (walk,) = look.look("fused", [TIME], GROUPED).walks
    assert walk.step("query").shape == "(B=1, H=4, T=5, K=4)"
    assert walk.step("value").shape == "(B=1, G=2, S=5, V=3)"
    assert walk.step("weights").shape == "(B=1, H=4, T=5, S=5)"


def test_a_word_is_the_same_vector_in_every_sentence_and_differs_with_the_seed():
    point = sentence.workload(5, (), seed=0)
    first, second = (sentence.embed(told.split(), point) for told in (TIME, FRUIT))
    assert torch.equal(first[1], second[1])  # flies
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first, sentence.embed(TIME.split(), sentence.workload(5, (), seed=1)))


def test_two_sentences_share_their_weights_and_are_joined_too():
    found = look.look("fused", [TIME, FRUIT], ["mask=none"])
    one, two = found.walks
    assert one.words == tuple(TIME.split())
    assert two.words == tuple(FRUIT.split())
    np.testing.assert_array_equal(one.step("query").values[0, :, 1], two.step("query").values[0, :, 1])
    assert found.joined is not None
    scores = found.joined.step("scores").values
    np.testing.assert_allclose(scores[..., :5, :5], one.step("scores").values, rtol=1e-12)
    np.testing.assert_allclose(scores[..., 5:, 5:], two.step("scores").values, rtol=1e-12)
    assert set(page.pictures.draw(found)) == {"weights", "joined", "mask", "beside", "scaling"}


# ------------------------------------------------------------------------------------------------- experiments


@pytest.mark.parametrize("example", FACTS["003"]["softmax_examples"])
def test_the_softmax_examples_of_tutorial_003(example):
    (made,) = [each for each in softness.examples() if list(each.scores) == example["logits"]]
    np.testing.assert_allclose(made.weights, example["weights"], atol=1e-4)


def test_a_vector_times_100_saturates_as_in_tutorial_004():
    vector, larger = softness.examples()[:2]
    assert larger.scores == tuple(100 * score for score in vector.scores)
    assert max(vector.weights) < 0.3
    np.testing.assert_allclose(sorted(larger.weights), [0, 0, 0, 0, 1], atol=1e-8)


def test_softness_by_value():
    alike, alone = softness.softness("", torch.zeros(3, 8).double()), softness.softness("", torch.eye(8).double() * 1e4)
    assert (alike.largest, alike.entropy) == (0.125, 3.0)
    assert (alone.largest, alone.entropy) == (1.0, 0.0)


def test_without_the_scale_the_largest_weight_grows_with_the_width():
    growth = softness.growth(0)
    assert growth.without[-1, 1] > 0.99
    assert (growth.with_scale[2:, 1] < 0.3).all()
    np.testing.assert_array_equal(growth.with_scale[0], growth.without[0])  # K = 1


def test_what_a_mask_changes():
    found = look.look("fused", [TIME], ["mask=none"])
    effect = found.walks[0].masking
    assert (effect.mask, effect.is_chosen) == ("causal", False)
    np.testing.assert_array_equal(effect.without, found.walks[0].step("weights").values[0])
    causal = look.look("fused", [TIME]).walks[0]
    np.testing.assert_array_equal(causal.masking.under, causal.step("weights").values[0])
    np.testing.assert_array_equal(effect.under, causal.masking.under)
    assert "hides 10 of 25 pairs" in tables.masking(causal)
    whole = look.look("fused", [TIME], ["mask=padding(5)"]).walks[0]
    assert "hides none of the 25 pairs" in tables.masking(whole)


# ------------------------------------------------------------------------------------------- beside the oracle


def planted(changes):
    """The textbook form with some steps changed, as an implementation."""

    class Planted(Attention):
        def __init__(self, weights):
            super().__init__(weights)
            self.canonical = weights

        def project(self, x, context):
            return {**steps.DEFAULTS, **changes}["projection"](x, context, self.canonical)

        def attend(self, query, key, value, mask):
            scene = Scene(mask=mask, rows=torch.arange(query.shape[2]))
            return steps.attend(query, key, value, scene, changes)["context"]

        def forward(self, x, context=None, *, mask):
            attended = self.attend(*self.project(x, x if context is None else context), mask)
            return {**steps.DEFAULTS, **changes}["output"](attended, self.canonical)

    return Implementation(build=Planted, source="")


SEEN_AT = {
    "projection": {"projection"},
    "heads": {"weights", "context"},
    "scores": {"weights"},
    "masked scores": {"weights"},
    "weights": {"weights"},
    "context": {"weights", "context"},
    "output": {"output"},
}


@pytest.mark.parametrize("settings", [(), ("mask=none",), GROUPED], ids=["causal", "none", "grouped"])
def test_a_planted_mistake_is_seen_at_its_own_step(settings):
    words = tuple(TIME.split())
    point = sentence.workload(len(words), settings, seed=0)
    given = sentence.inputs(words, point)
    seen = set()
    for each in catalogue(point):
        kind = each.mistake
        if kind.is_random or kind.is_rounding or kind.is_gradient or kind.is_memory:
            continue
        found = beside.beside(planted(each.changes), words, point, given)
        last = found.compared[-1]
        if last.outcome is Outcome.agrees:  # these words cannot tell: that is what the check's probes are for
            continue
        assert found.first is not None
        assert found.first.step in SEEN_AT[kind.step(each.changes)], each.words
        seen.add(each.name)
    assert {"no_scale", "scaled_by_width", "softmax_over_queries", "not_normalised"} <= seen
    if not settings:
        assert {"projections_in_wrong_order", "no_input_biases", "query_key_swapped"} <= seen


def test_the_right_form_agrees_in_every_step():
    for settings in ((), GROUPED, ("mask=none", "value_dim=2")):
        words = tuple(TIME.split())
        point = sentence.workload(5, settings, seed=0)
        found = beside.beside(planted({}), words, point, sentence.inputs(words, point))
        assert [each.name for each in found.compared] == ["query", "key", "value", "weights", "context", "output"]
        assert {each.outcome for each in found.compared} == {Outcome.agrees}


def test_weights_are_revealed_a_few_columns_at_a_time():
    scores = torch.randn(1, 2, 7, 7, dtype=torch.float64)
    weights = scores.softmax(dim=-1)
    for width in (1, 3, 7, 9):
        like = torch.zeros(1, 2, 7, width, dtype=torch.float64)
        torch.testing.assert_close(beside.revealed(lambda values: weights @ values, like), weights)


def test_the_first_difference_is_told_with_its_words(folder):
    found = found_in(folder, "no_scale")
    (line,) = tables.first_difference(found)
    assert line.startswith("weights: first difference, head ")
    first = found.besides[0].first
    _, head, row, column = first.place
    words = TIME.split()
    assert f"head {head}, query '{words[row]}', key '{words[column]}'" in line
    here, right = first.values_there()
    assert abs(here - right) == first.largest
    assert f"{here:.4g}, the oracle says {right:.4g}" in line
    assert f"[{here:.2f}]" in shown(found)
    assert line in shown(found)


def test_a_word_that_stands_twice_is_told_by_its_place(folder):
    found = found_in(folder, "no_scale", "a b b a")
    assert "(word " in tables.first_difference(found)[0]


def test_a_wrong_projection_is_seen_first_and_attention_is_judged_apart(folder):
    (found,) = found_in(folder, "Swapped").besides
    outcomes = {each.name: each.outcome for each in found.compared}
    assert found.first.name == "query"
    assert outcomes["weights"] is outcomes["context"] is outcomes["value"] is Outcome.agrees
    assert outcomes["output"] is Outcome.differs


def test_an_order_of_its_own_is_no_difference_where_the_output_is_right(folder):
    found = found_in(folder, "Own")
    assert not found.differs
    assert found.besides[0].compared[0].outcome is Outcome.its_own


@pytest.mark.parametrize(
    ("name", "step", "said"),
    [
        ("raising", "context", "it raised RuntimeError: out of <ideas> (theirs.py, line 20)"),
        ("leaving", "context", "it raised SystemExit: 0"),
        ("nan", "weights", "nan, the oracle says"),
        ("transposed", "context", "its shape is (B=1, H=5, T=2, V=4); it should be (B=1, H=2, T=5, V=4)"),
        ("nothing", "context", "it gave a NoneType, no tensor"),
        ("whole", "context", "of int64; it should be"),
        ("Unbuildable", "output", "it cannot be built: KeyError"),
    ],
)
def test_what_goes_wrong_is_told_in_words(folder, name, step, said):
    found = found_in(folder, name)
    assert found.differs
    assert found.besides[0].first.step == step
    assert said in tables.first_difference(found)[0]
    assert said in shown(found)
    assert said in html.unescape(page.page(found, {}))
    json.dumps(summary.summary(found, []), allow_nan=False)


def test_a_module_without_attend_is_compared_by_its_output_and_says_so():
    found = look.look("torch_mha", [TIME])
    assert [each.name for each in found.besides[0].compared] == ["output"]
    assert not found.differs
    assert "cannot be seen" in shown(found)
    assert "beside" not in page.pictures.draw(found)


def test_a_workload_that_is_unsupported_is_not_compared(folder):
    found = found_in(folder, "unmasked")
    assert not found.is_checked
    assert "try --set mask=none" in shown(found)
    assert not found_in(folder, "unmasked", settings=["mask=none"]).differs


# ------------------------------------------------------------------------------------------------------- shown


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.texts = set(), []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.texts.append(data)


def test_words_from_outside_are_harmless_and_shown_as_they_are(folder, tmp_path):
    found = found_in(folder, "raising", EVIL)
    paths = page.write(found, tmp_path)
    source = paths[0].read_text()
    tags = Tags()
    tags.feed(source)
    assert not tags.names & {"script", "img", "link", "iframe"}
    assert any("<script>alert(1)</script>" in told for told in tags.texts)
    assert any("out of <ideas>" in told for told in tags.texts)
    assert "\x1b" not in source
    told = shown(found)
    assert "\x1b" not in told
    assert "[bold]not" in told
    for path in paths:
        if path.suffix == ".svg":
            ET.fromstring(path.read_text())  # noqa: S314 - drawn by us


def test_a_page_takes_the_place_of_an_earlier_one(tmp_path):
    two = page.write(look.look("fused", [TIME, FRUIT]), tmp_path)
    assert tmp_path / "joined.svg" in two
    page.prepare(tmp_path)
    page.write(look.look("torch_mha", [TIME]), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"inspect.html"} | {
        f"{stem}.{end}" for stem in ("weights", "mask", "scaling") for end in ("svg", "png")
    }


def test_tables_are_aligned_and_fit_the_terminal():
    found = look.look("fused", ["注意力 is all you need", "a b c d e f g h i j k l m"], ["num_heads=1", "head_dim=16"])
    for line in shown(found, width=80).splitlines():
        assert cell_len(line) <= 80
    table = tables.of_step(found.walks[0], found.walks[0].step("weights"))[0]
    assert len({cell_len(line) for line in text.lines_of(table)[1:]}) == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.5, -0.25]], [["1.50", "-0.25"]]),
        ([[0.5, 0.0]], [["0.500", "0"]]),
        ([[-math.inf, 123.4]], [["-inf", "123"]]),
        ([[math.nan, 1e-7]], [["nan", "1.00e-07"]]),
        ([[2e6, -1.0]], [["2.00e+06", "-1.00e+00"]]),
        ([[3.0, -0.001]], [["3.00", "0.00"]]),
    ],
)
def test_numbers_have_as_many_digits_as_they_need(values, expected):
    assert tables.shown(np.array(values)) == expected


# ----------------------------------------------------------------------------------------------- wrong usage


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
        ([TIME], ["mask=alibi"], "changes scores"),
        ([TIME], ["mask=padding(9)"], "with one length for each batch row"),
    ],
)
def test_wrong_usage_says_what_is_allowed(sentences, settings, said):
    with pytest.raises(ValueError, match=said):
        look.look("fused", sentences, settings)


def test_the_command_prints_draws_and_exits_as_it_found(folder):
    found = attnbench("inspect", "--sentence", TIME, "--sentence", FRUIT, "--set", "num_heads=1", cwd=folder)
    assert found.returncode == 0, found.stderr
    assert "fused agrees with the oracle" in found.stdout
    assert {"inspect.html", "weights.svg", "joined.png"} <= {
        p.name for p in (folder / "results/inspect/fused").iterdir()
    }
    wrong = attnbench("inspect", "theirs.py:leaving", "--to", "pages/mine", "--json", cwd=folder)
    assert wrong.returncode == 1
    told = json.loads(wrong.stdout)
    assert "SystemExit" in told["first_difference"][0]
    assert all((folder / file).exists() for file in told["files"])
    assert attnbench("inspect", "broken.py:f", cwd=folder).returncode == 1
    assert attnbench("inspect", "theirs.py:unmasked", cwd=folder).returncode == 3
    (folder / "file").write_text("in the way")
    for arguments in (
        ["--sentence", ""],
        ["fusde"],
        ["--set", "num_heads=3", "--set", "embed_dim=8"],
        ["--to", "file/x"],
    ):
        refused = attnbench("inspect", *arguments, cwd=folder)
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ")
        assert len(refused.stderr.strip().splitlines()) == 1
