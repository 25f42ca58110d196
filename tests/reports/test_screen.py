"""The closing screen: 25 lines of 80 columns for any sweep, and the questions that it answers."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.sanity import SystemLoad
from attnbench.reports import answers, story
from attnbench.reports.screen import HEIGHT, WIDTH, screen
from tests import journals
from tests.reports import snapshots
from tests.reports.snapshots import SWEEPS


def lines(results):
    return [line.text for line in screen(results)]


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    return cache(lambda name: SWEEPS[name](tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize("name", SWEEPS)
def test_it_is_as_stored_in_25_lines_of_80_columns_at_most(name, sweeps):
    stored = (snapshots.FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert snapshots.text(sweeps(name)) == stored, "renew it: python -m tests.reports.snapshots"
    assert len(stored.splitlines()) <= HEIGHT
    assert all(len(line) <= WIDTH for line in stored.splitlines())


QUESTIONS = {
    "What was run, on how many shapes?": r"^quick: \d+ implementations on \d+ shapes",
    "Is anything wrong?": r"^quick: .*, all right \(\d+ checks against float64\)$",
    "On which machine, with which torch?": r"^.*, \d+ cores?, torch \S+, ",
    "How long did it take, and in how many processes?": r", \d+ s, \d+ processes, ",
    "Was the machine quiet?": r", quiet$",
    "What margin counts?": r"^Differences below \S+ % count as equal\.$",
    "How long does a call of sdpa take at T=512?": r"^no mask +T=512 +\S+ ms ",
    "Which is the fastest in bfloat16?": r"^bfloat16 no mask +T=\d+ +\S+ ms +bmm \d\.\d\dx",
    "What should I take?": r"^Take bmm for bfloat16 \(\d\.\d\dx faster than sdpa\)",
    "What do I keep elsewhere?": r"Keep\s+sdpa (elsewhere|on \d+ of the others)",
    "How much memory does fused take at T=1024?": r"^Memory at causal T=1024: [^.]*?\bfused\b[^;]* \d+\s+MiB",
    "What is not decided?": r"^Undecided: \d+ of \d+",
    "What could not be run here?": r"^Unsupported: \d+ \(reasons: summary\.md\)",
    "Where is the report, and how do I open it?": r"^Report: \S+report\.html\nOpen: attnbench report \S+ --open",
    "Which file has the picture?": r"picture\.png",
    "Which file has every number?": r"records\.csv",
    "How do I see more?": r"^\d+ more rows \(summary\.md\)",
}
"""Questions of a new user, and the line of the first screen that answers each of them."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_screen_of_a_real_quick_sweep_answers(question):
    text = (Path(__file__).parents[2] / "results" / "gallery" / "quick" / "screen.txt").read_text(encoding="utf-8")
    assert re.search(QUESTIONS[question].replace("[^.]*?", r"[\s\S]*?"), text, re.MULTILINE), question


def test_every_notable_shape_is_in_a_row_and_the_others_are_counted(sweeps):
    found = sweeps("quick")
    shown = lines(found)
    first = next(place for place, line in enumerate(shown) if line.startswith("Time of a call"))
    rows = shown[first + 1 : shown.index("", first) - 1]
    (number,) = re.match(r"(\d+) more rows", shown[first + 1 + len(rows)]).groups()
    assert len(rows) + int(number) == len(answers.shapes(found))
    num_faster = sum(bool(shape.faster) for shape in answers.shapes(found))
    assert sum(bool(re.search(r"\d\.\d\dx", row)) for row in rows) == num_faster


def test_a_few_undecided_comparisons_are_named(tmp_path):
    points = journals.workloads(seq_len=(512, 1024))
    found = journals.write(tmp_path / "few", points, ("sdpa", "fused"), num_epochs=3)
    assert "Undecided: 2 of 2 (fused at T=512; fused at T=1024)." in lines(found)
    many = journals.write(tmp_path / "many", points, ("sdpa", "fused", "bmm"), num_epochs=3)
    assert "Undecided: 4 of 4." in lines(many)


def test_doubt_comes_before_verdicts_and_leaves_none(sweeps):
    load = SystemLoad(others=0.83, stolen=0.0, free_bytes=2**30)
    shown = lines(dataclasses.replace(sweeps("quick"), system_load=load))
    assert len(shown) <= HEIGHT
    assert shown[1].endswith("DOUBTFUL")
    doubt = next(place for place, line in enumerate(shown) if line.startswith("High CPU contention"))
    assert doubt < next(place for place, line in enumerate(shown) if line.startswith("Time of a call"))
    table = "\n".join(shown[doubt:])
    assert not re.search(r"\d\.\d\dx|faster|slower|equal", table)
    assert re.search(r"^Doubtful: (\d+) of \1\.", table, re.MULTILINE)


def test_gpus_have_their_names_without_further_facts(sweeps, monkeypatch):
    found = sweeps(next(iter(SWEEPS)))
    kinds = "NVIDIA H200, 150109880320 bytes, compute capability 9.0; NVIDIA L4, 8 bytes, compute capability 8.9"
    environments = {
        name: msgspec.structs.replace(environment, accelerator=kinds)
        for name, environment in found.environments.items()
    }
    monkeypatch.setattr(type(found), "environments", environments)
    assert any(line.startswith("NVIDIA H200, NVIDIA L4, ") for line in lines(found))
    (environment,) = environments.values()
    memory = "NVIDIA H200, 140 GiB, compute capability 9.0; NVIDIA L4, 8.00 B,"
    assert story.described(environment)["accelerator"].startswith(memory)
