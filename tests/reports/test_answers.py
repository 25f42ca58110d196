"""Advice of a run: the implementation to use, its range and its gain; derived from verdicts alone."""

import dataclasses
import re

import pytest

from attnbench import plugins
from attnbench.analysis import recommendation
from attnbench.analysis.conclusion import Mark
from attnbench.analysis.recommendation import recommend
from attnbench.analysis.sanity import SystemLoad
from attnbench.reports import answers, exit_status, recommended, screen, summary, verdict
from attnbench.storage.records import Status
from tests import journals


def advice(results):
    return " ".join(answers.advice(results))


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((4, 64, 512), "Take fused up to T=4 ("),
        ((512, 4, 64), "Take fused up to T=4 ("),  # in any order of input
        ((128, 512, 2048), "Keep sdpa: fused is 1."),
        ((512,), "Keep sdpa: fused is 2.0"),
        ((2, 4), "Take fused on all 2 shapes ("),
    ],
)
def test_of_two_the_advice_names_the_length_where_they_change_places(lengths, said, tmp_path):
    results = journals.write(tmp_path / "run", journals.workloads(seq_len=lengths), ("sdpa", "fused"))
    assert advice(results).startswith(said)


def test_a_factor_says_how_much_faster_it_is(tmp_path, monkeypatch):
    points = journals.workloads(seq_len=(512,))
    for name in ("bmm", "fused"):
        monkeypatch.setitem(journals.SPEEDS, name, (0.65e-3, 1.8, 2.0))
    found = journals.write(tmp_path, points, ("sdpa", "bmm", "fused", "chunked"))
    (factor,) = re.findall(r"Take (?:bmm|fused) on this shape \(([\d.]+)x faster than sdpa\)", advice(found))
    assert float(factor) == pytest.approx(2.0, rel=0.05)
    assert re.search(r"\), or (bmm|fused): not slower by these times\.$", advice(found))  # which one it takes is chance
    (shape,) = answers.shapes(found)
    assert {each.name for each in shape.faster} == {"bmm", "fused"}
    assert [each.name for each in shape.having(Mark.slower)] == ["chunked"]


def test_one_that_is_slower_than_the_choice_is_not_named_as_equal(tmp_path, monkeypatch):
    speeds = {"sdpa": 3e-3, "bmm": 1e-3, "fused": 2e-3, "einsum": 1e-3}
    times = {"time_of": lambda _, name: speeds[name]}
    found = journals.write(tmp_path, journals.workloads(seq_len=(512,)), (*speeds,), **times)
    said = r"Take (bmm|einsum) on this shape \(.*\), or (bmm|einsum): not slower by .*; 1 other beats sdpa, too\."
    assert re.fullmatch(said, advice(found))


def test_a_time_without_the_gathering_of_keys_is_no_faster_one(tmp_path, monkeypatch):
    """A dense function once won over every kernel that reads pages."""
    points = journals.workloads(batch=("16q1kv1k",), page_size=(16,))
    found = journals.write(tmp_path, points, ("sdpa", "fused", "bmm"), time_of=lambda _, name: 1e-3 * len(name))
    for module in (plugins, recommendation):  # as if sdpa read pages
        monkeypatch.setattr(module, "is_dense", lambda spec: spec != "sdpa")
    (shape,) = answers.shapes(found)
    assert (shape.faster, shape.best.name) == ([], "sdpa")
    assert shape.text_of("bmm").endswith("^")
    assert advice(found) == "Keep sdpa: nothing is faster on this shape."
    assert "bmm, fused: the keys were gathered before the call" in answers.batch_line(found)
    assert "^ without gathering its keys" in answers.legend([shape])
    (chosen,) = recommend(found)
    assert chosen.choice == "sdpa"
    assert {str(why) for why in chosen.excluded.values()} == {recommendation.GATHERED}


def test_what_is_undecided_is_never_advice(tmp_path):
    short = journals.write(tmp_path, journals.workloads(seq_len=(512,)), ("sdpa", "fused"), num_epochs=3)
    assert re.fullmatch(r"fused is undecided, 2\.0\dx slower so far \(too few processes\) at T=512\.", advice(short))


@pytest.fixture
def without_baseline(tmp_path, monkeypatch):
    """A run whose baseline is wrong on causal shapes, like stock SDPA's gradients on an H100."""
    usual = journals.status

    def status(workload, name):
        is_bad = name == journals.BASELINE and workload.mask == "causal"
        return (Status.disagrees, "its gradient is off", False) if is_bad else usual(workload, name)

    monkeypatch.setattr(journals, "status", status)
    points = journals.workloads(mask=("none", "causal"), seq_len=(512, 2048))
    return journals.write(tmp_path / "run", points, ("sdpa", "chunked", "bmm"))


def test_the_first_right_implementation_replaces_a_wrong_baseline(without_baseline):
    """On an H100 the answer named the wrong one, and ranked no other."""
    found = without_baseline
    assert advice(found).startswith("Keep sdpa: nothing is faster on any of 2 shapes. sdpa is WRONG on causal T=512, ")
    assert "causal T=2048: the others are compared with chunked. Keep chunked: bmm is 1." in advice(found)
    rows = {row["shape"]: row for row in answers.table(answers.shapes(found))}
    causal = rows["causal T=512"]
    assert [rows[name]["fastest"] for name in ("causal T=512", "no mask T=512")] == ["chunked", "sdpa"]
    assert causal["sdpa"] == "WRONG"
    assert rows["no mask T=512"]["sdpa"].endswith("ms *")
    shown = "\n".join(line.text for line in screen.screen(found))
    assert re.search(r"^causal +T=512 +WRONG +\S+ ms \* ", shown, re.MULTILINE)
    choices = verdict.report(found, exit_status.of_run(found), 1, ["run"]).choices
    assert [choice.reference for choice in choices] == ["sdpa", "sdpa", "chunked", "chunked"]
    assert [choice.choice for choice in choices] == ["sdpa", "sdpa", "chunked", "chunked"]
    assert causal["chunked"] in summary.html_page(found)
    assert re.search(r"\| bmm .* 1\.\d+x slower than chunked \(", summary.markdown(found))
    answered = recommended.answer(recommend(found)[-1])
    assert answered.startswith("Take chunked: it is the fastest, 1.")


def test_an_implementation_of_ones_own_has_a_sentence_among_many(tmp_path, monkeypatch):
    """On a full table the slower ones have no column, so a user did not see how slow the own one was."""
    monkeypatch.setitem(journals.SPEEDS, "mine", (2.6e-3, 1.6, 0.0))
    names = ("sdpa", "sdpa_flash", "fused", "bmm", "chunked", "mine")
    points = journals.workloads(seq_len=(256, 512))
    found = journals.write(tmp_path, points, names)
    assert re.search(r"Next to sdpa, mine is (1\.9|2\.0)\dx( to 2\.0\dx)? slower\.$", advice(found))
    assert "Next to sdpa" not in advice(journals.write(tmp_path / "ours", points, names[:-1]))


def test_a_table_has_the_same_columns_in_every_row_and_no_blank(tmp_path):
    rows = answers.table(answers.shapes(journals.write(tmp_path)))
    assert len(rows) == len(journals.USUAL)
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    assert all(text.strip() for row in rows for text in row.values())
    assert len({row["shape"] for row in rows}) == len(rows)


def test_doubtful_rows_name_nobody(tmp_path):
    points = journals.workloads(seq_len=(128, 512))
    results = journals.write(tmp_path, points, ("sdpa", "fused", "bmm"))
    load = SystemLoad(others=0.83, stolen=0.0, free_bytes=2**30)
    doubtful = dataclasses.replace(results, system_load=load)
    assert advice(doubtful).startswith("No recommendation: ")
    assert {row["fastest"] for row in answers.table(answers.shapes(doubtful))} == {"doubtful"}
    end = exit_status.of_run(doubtful)
    choices = verdict.report(doubtful, end, 3, ["run"]).choices
    assert [each.choice for each in choices] == [None, None]
    assert [each.choice for each in verdict.report(results, end, 0, ["run"]).choices] == ["sdpa", "sdpa"]
