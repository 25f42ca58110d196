"""An inspection: its steps equal the oracle's, the first difference is the mistake, and its pictures are complete."""

import html
import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from attnbench.checking import oracle, steps
from attnbench.checking.mistakes import catalogue
from attnbench.cli import app
from attnbench.contract import Attention, Implementation
from attnbench.inspection import oracle_diff, text
from attnbench.inspection.oracle_diff import inspect_implementation
from studies.detection.planted import at_rows

TIME, FRUIT = "time flies like an arrow", "fruit flies like a banana"
WORDS = tuple(TIME.split())
GROUPED = ("num_heads=4", "num_kv_heads=2", "value_dim=3")
CAPPED = ("mask=causal+softcap(2)+alibi",)
SLIPS = Path(__file__).with_name("slips.py")
EVIL = 'fruit <script>alert(1)</script> "quoted" & \x1b[31mred [bold]not[/bold]'


def found_in(name, sentence=TIME, settings=()):
    return inspect_implementation(f"{SLIPS}:{name}", sentence, settings)


def walk_of(settings=(), seed=0):
    return oracle_diff.walk_through(WORDS, oracle_diff.workload_of(len(WORDS), settings, seed))


def shown(found, width=100):
    file = io.StringIO()
    text.write(found, Console(width=width, file=file))
    return file.getvalue()


@pytest.mark.parametrize("settings", [(), GROUPED, ("mask=none",), ("mask=sliding_window(2)", "embed_dim=12"), CAPPED])
def test_each_step_is_the_oracles(settings):
    walk = walk_of(settings, seed=3)
    point, given = walk.workload, walk.inputs
    x = given.tensors["x"]
    query, key, value = oracle.project(x, x, given.weights)
    under = oracle.row_mask(point, torch.arange(5))

    def attend(values):
        return oracle.attend(query, key, values, under)

    expected = {"x": x, "query": query, "key": key, "value": value, "context": attend(value)}
    expected["weights"] = oracle.weights(attend, value)
    expected["output"] = oracle.answer(point, given, torch.arange(5))
    for name, tensor in expected.items():
        np.testing.assert_allclose(walk.steps[name], tensor.numpy(), rtol=1e-12, atol=1e-14)
    scores, masked = walk.steps["scores"], walk.steps["masked scores"]
    hidden = ~np.broadcast_to(under.seen.numpy(), scores.shape)
    assert (masked[hidden] == -np.inf).all()
    assert (masked[~hidden] == scores[~hidden]).all() == (not point.mask_rule.changes_scores)


def test_a_word_is_the_same_vector_in_every_sentence_and_differs_with_the_seed():
    point = oracle_diff.workload_of(5, (), seed=0)
    first, second = (oracle_diff.inputs_of(reported.split(), point).tensors["x"][0] for reported in (TIME, FRUIT))
    assert torch.equal(first[1], second[1])  # flies
    assert not torch.equal(first[0], second[0])
    other = oracle_diff.inputs_of(TIME.split(), oracle_diff.workload_of(5, (), seed=1))
    assert not torch.equal(first, other.tensors["x"][0])


@pytest.mark.parametrize(
    ("sentence", "settings", "said"),
    [
        (" ", [], "has no words"),
        ("w " * 25, [], "is too long to look at"),
        (TIME, ["nmu_heads=3"], "did you mean num_heads?"),
        (TIME, ["seq_len=3"], "takes no --set seq_len"),
        (TIME, ["num_heads=3", "embed_dim=8"], "divisors of embed_dim"),
        (TIME, ["num_heads=2,4"], "takes one value"),
        (TIME, ["num_heads=9"], "at most 8 heads"),
        (TIME, ["mask=padding(9)"], "with one length for each batch row"),
    ],
)
def test_wrong_usage_says_what_is_allowed(sentence, settings, said):
    with pytest.raises(ValueError, match=said):
        inspect_implementation("fused", sentence, settings)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.texts, self.shades = set(), [], set()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.shades |= {value for name, value in attrs if name == "style"}
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.texts.append(data)


def test_words_from_outside_are_harmless_and_shown_as_they_are(tmp_path):
    found = inspect_implementation(f"{SLIPS}:raising", EVIL)
    source = text.write_page(found, tmp_path).read_text()
    tags = Tags()
    tags.feed(source)
    assert not tags.names & {"script", "img", "link", "iframe"}
    assert any("<script>alert(1)</script>" in text for text in tags.texts)
    assert any("out of <ideas>" in text for text in tags.texts)
    assert "\x1b" not in source
    printed = shown(found)
    assert "\x1b" not in printed
    assert "[bold]not" in printed


def test_the_page_shows_every_step_and_shades_the_weights(tmp_path):
    found = inspect_implementation("fused", TIME, ["mask=none"])
    tags = Tags()
    tags.feed(text.write_page(found, tmp_path).read_text())
    walk = found.walk
    weights = text.step_tables(walk, "weights")
    assert {text for table in weights for row in table.rows for text in row} <= set(tags.texts)
    assert all(walk.shape(name) in tags.texts for name in walk.steps)
    assert f"background: rgba(86, 180, 233, {walk.steps['weights'].max():.2f})" in tags.shades
    assert not text.step_tables(walk, "scores")[0].shades


def test_tables_are_aligned_and_fit_the_terminal():
    printed = shown(inspect_implementation("fused", "all of it is attention"), width=80)
    assert all(len(line) <= 80 for line in printed.splitlines())
    table = text.step_tables(inspect_implementation("fused", TIME).walk, "weights")[0]
    assert len({len(line) for line in table.lines(200)[2:]}) == 1


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
    assert text.formatted(np.array(values)) == expected


def test_the_command_prints_writes_a_page_and_exits_by_its_finding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\ndef f(query, key, value): ...\n")
    right = CliRunner().invoke(app, ["inspect", "--sentence", FRUIT, "--set", "num_heads=1"])
    assert right.exit_code == 0
    assert "fused agrees with the oracle" in right.stdout
    assert FRUIT in (tmp_path / "results/inspect/fused/inspect.html").read_text()
    wrong = CliRunner().invoke(app, ["inspect", f"{SLIPS}:leaving", "--to", "pages/mine", "--json"])
    assert wrong.exit_code == 1
    printed = json.loads(wrong.stdout)
    assert "SystemExit" in printed["first_difference"]
    assert all((tmp_path / file).exists() for file in printed["files"])
    assert CliRunner().invoke(app, ["inspect", "broken.py:f"]).exit_code == 1
    assert CliRunner().invoke(app, ["inspect", f"{SLIPS}:unmasked"]).exit_code == 3
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"^cannot write to [^\n]+$"):
        CliRunner().invoke(app, ["inspect", "--to", "file/x"], catch_exceptions=False)


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
    diff = found_in("slightly_large")
    (context,) = (each for each in diff.comparisons if each.name == "context")
    assert not context.agrees
    assert context.largest > 2 * context.tolerance
    diff = found_in("right")
    assert all(each.agrees for each in diff.comparisons)
    assert all(each.largest < each.tolerance / 2 for each in diff.comparisons)


SEEN_AT = {"projection": {"projection"}, "scores": {"weights"}, "masked scores": {"weights"}, "weights": {"weights"}}
SEEN_AT |= {"heads": {"weights", "context"}, "context": {"weights", "context"}, "output": {"output"}}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("settings", [(), ("mask=none",), GROUPED], ids=["causal", "none", "grouped"])
def test_a_planted_mistake_is_seen_at_its_own_step(settings):
    walk, seen = walk_of(settings), set()
    for each in catalogue(walk.workload):
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
        found = oracle_diff.compare(planted({}), walk_of(settings))
        assert [each.name for each in found.comparisons] == ["query", "key", "value", "weights", "context", "output"]
        assert all(each.agrees for each in found.comparisons)


def test_the_first_difference_is_reported_with_its_words():
    found = found_in("no_scale")
    line = text.first_difference(found)
    assert line.startswith("weights: largest difference at head ")
    first = found.first
    _, head, row, column = first.place
    assert f"head {head}, query '{WORDS[row]}', key '{WORDS[column]}'" in line
    here, right = first.values_there()
    assert abs(here - right) == pytest.approx(first.largest)
    assert f"{here:.4g}, the oracle has {right:.4g}" in line
    assert f"[{here:.2f}]" in shown(found)
    assert line in shown(found)
    assert "(word " in text.first_difference(found_in("no_scale", "a b b a"))  # a word that stands twice


def test_a_wrong_projection_is_seen_first_and_attention_is_judged_apart():
    found = found_in("Swapped")
    right = {each.name: each.agrees for each in found.comparisons}
    assert found.first.name == "query"
    assert right["weights"] and right["context"] and right["value"]  # noqa: PT018
    assert not right["output"]


def test_projections_inside_a_forward_of_its_own_are_not_asked_for():
    for name in ("module_list", "torch_mha"):
        found = inspect_implementation(name)
        assert "its projections cannot be seen" in found.unseen
        assert found.comparisons[-1].name == "output"
        assert all(each.agrees for each in found.comparisons)


def test_an_order_of_its_own_is_no_difference_where_the_output_is_right():
    found = found_in("Own")
    assert found.first is None
    assert [each.name for each in found.comparisons] == ["value", "weights", "context", "output"]


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
            "returned (1, 5, 2, 4): it must return one tensor (B, H, T, V), here (1, 2, 5, 4)",
        ),
        ("nothing", "context", "returned a NoneType: it must return one tensor (B, H, T, V), here (1, 2, 5, 4)"),
        ("whole", "context", "of int64; it should be"),
        ("Unbuildable", "output", "it cannot be built: KeyError"),
    ],
)
def test_what_goes_wrong_is_reported_in_words(name, step, said, tmp_path):
    found = found_in(name)
    assert found.first is not None
    assert found.first.step == step
    assert said in text.first_difference(found)
    assert said in shown(found)
    assert said in html.unescape(text.write_page(found, tmp_path).read_text(encoding="utf-8"))


def test_a_workload_that_is_unsupported_is_not_compared():
    found = found_in("unmasked")
    assert not found.comparisons
    assert "try --set mask=none" in shown(found)
    assert found_in("unmasked", settings=["mask=none"]).first is None
