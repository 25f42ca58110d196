"""The closing screen: 25 lines of 80 columns for any sweep, and the questions that it answers."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.sanity import SystemLoad
from attnbench.reports import answers, summary
from attnbench.reports.cells import Cell
from attnbench.reports.screen import HEIGHT, WIDTH, screen
from attnbench.units import sanitize_line
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
    "What margin counts?": r"^Differences below \S+ % count as equal\. ",
    "How do I get the same inputs again?": r" Repeat: --seed \d+\.$",
    "How long does a call of sdpa take at T=1024?": r"^Time of a call +T=1024 .*\nsdpa +\S+ ms ",
    "How long does a call of transformers_sdpa take there?": r"^At causal T=1024: transformers_sdpa \S+ ms ",
    "And one of einsum?": r"\beinsum\s\S+ ms",
    "Which is the fastest in bfloat16?": r" bfloat16 .*\n(.*\n)+bmm .* us \* +\d+ MiB",
    "What do the signs mean?": r"^\* fastest, .*= equal to sdpa, \? undecided",
    "What should I take?": r"^Take bmm for bfloat16 \(\d\.\d\dx faster than sdpa\)",
    "What do I keep elsewhere?": r"Keep\s+sdpa (elsewhere|on \d+ of the others)",
    "How much memory does bmm take at T=1024?": r" memory\n.* causal\n.* T=1024\n(.*\n)+bmm .* 66 MiB",
    "What is not decided?": r"^Undecided: \d+ of \d+",
    "What could not be run here?": r"Unsupported: \d+ implementations \(summary\.md\)",
    "Where is the report, and how do I open it?": r"^Report: \S+report\.html\nOpen: attnbench report \S+ --open",
    "Which file has the picture?": r"picture\.png",
    "Which file has every number?": r"records\.csv",
    "How do I see more?": r"^\d+ more shapes \(summary\.md\)",
}
"""Questions of a new user, and the line of the first screen that answers each of them."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_screen_of_a_real_quick_sweep_answers(question):
    text = (Path(__file__).parents[2] / "results" / "gallery" / "quick" / "screen.txt").read_text(encoding="utf-8")
    assert re.search(QUESTIONS[question].replace("[^.]*?", r"[\s\S]*?"), text, re.MULTILINE), question


@pytest.mark.parametrize("sweep", ["quick", "one shape", "wrong", "no baseline", "many lengths"])
def test_every_implementation_has_its_time_and_every_fastest_is_marked(sweep, sweeps):
    found = sweeps(sweep)
    shown = lines(found)
    start = next(place for place, line in enumerate(shown) if line.startswith("Time of a call"))
    text = "\n".join(shown[start : shown.index("", start)])
    for name in {cell.name for shape in answers.shapes(found) for cell in shape.cells if cell.seconds is not None}:
        assert re.search(rf"{re.escape(sanitize_line(name, 20))}\s+\S", text), name
    assert bool(re.search(r"[mu]s \*", text)) is ("* fastest" in text) is (sweep != "many lengths")


def test_a_time_says_in_place_what_it_is_worth(tmp_path):
    points = journals.workloads(scope=("attention", "module"), mask=("causal",), seq_len=(128, 2048))
    names = ("sdpa", "sdpa_flash", "fused", "module_list", "sdpa_math", "naive_loop", "torch_mha")
    texts = {
        (shape.workload.scope, shape.workload.seq_len, name): shape.text_of(name)
        for shape in answers.shapes(journals.write(tmp_path, points, names))
        for name in names
    }
    assert texts["attention", 128, "sdpa"].endswith("us *")
    assert texts["attention", 128, "sdpa_flash"].endswith("us =")
    assert texts["attention", 128, "fused"].endswith("us ")
    assert texts["module", 128, "module_list"] == "WRONG"
    assert texts["attention", 2048, "sdpa_math"] == "failed"
    assert texts["attention", 2048, "naive_loop"] == "not run"
    assert texts["attention", 128, "torch_mha"] == "-"


def test_a_few_undecided_comparisons_are_named(tmp_path):
    points = journals.workloads(seq_len=(512, 1024))
    found = journals.write(tmp_path / "few", points, ("sdpa", "fused"), num_epochs=3)
    assert "Undecided: 2 of 2 (fused at T=512; fused at T=1024)." in lines(found)
    many = journals.write(tmp_path / "many", points, ("sdpa", "fused", "bmm"), num_epochs=3)
    assert "Undecided: 4 of 4." in lines(many)


def test_what_the_sweep_left_out_is_named_with_the_reason(tmp_path, monkeypatch):
    found = journals.write(tmp_path, journals.workloads(seq_len=(512, 1024)), ("sdpa", "naive_loop"))
    ids = tuple(each.id for each in found.plan.workloads[:1])
    out = {"why_left_out": {"flex": "too long", "naive_loop": ""}, "left_out": {"naive_loop": ids}}
    monkeypatch.setattr(type(found), "plan", msgspec.structs.replace(found.plan, **out))
    assert any(line.endswith("Left out: flex (too long), naive_loop on 1 of 2 shapes.") for line in lines(found))


def test_a_text_that_is_cut_says_so_and_nothing_measured_takes_no_column(sweeps, monkeypatch):
    """A warning once ended within a sentence, and a column of memory had only dashes."""
    found = sweeps("quick")
    texts = ["A short warning.", "word " * 40, "Never seen."]
    monkeypatch.setattr(summary, "troubles", lambda _: texts)
    shown = lines(found)
    place = shown.index("A short warning.")
    assert shown[place + 2].endswith(" ...")
    assert shown[place + 3] == "More warnings: summary.md"
    assert "MiB" in "\n".join(shown)
    monkeypatch.setattr(Cell, "peak_bytes", None)
    assert "memory" not in "\n".join(lines(found)).lower()


def test_doubt_comes_before_verdicts_and_leaves_none(sweeps):
    load = SystemLoad(others=0.83, stolen=0.0, free_bytes=2**30)
    shown = lines(dataclasses.replace(sweeps("quick"), system_load=load))
    assert len(shown) <= HEIGHT
    assert shown[1].endswith("DOUBTFUL")
    doubt = next(place for place, line in enumerate(shown) if line.startswith("High CPU contention"))
    assert doubt < next(place for place, line in enumerate(shown) if line.startswith("Time of a call"))
    table = "\n".join(shown[doubt:])
    assert not re.search(r"\d\.\d\dx|faster|slower|equal|fastest|\*", table)
    assert "~ doubtful" in table
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
    assert summary.describe_environment(environment)["accelerator"].startswith(memory)
