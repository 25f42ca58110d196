"""A terminal of 80 columns: whole words, warnings before results, a legend below each question mark."""

import dataclasses
import gzip
import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from attnbench.analysis.conclusion import Mark
from attnbench.analysis.results import Results, read
from attnbench.analysis.sanity import SystemLoad
from attnbench.commands import terminal
from attnbench.reports import answers, story
from tests import journals

POINTS = journals.workloads(mask=("none", "causal"), seq_len=(128, 512))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return journals.write(tmp_path_factory.mktemp("run"), POINTS, ("sdpa", "fused", "bmm", journals.EVIL))


def printed(results: Results, monkeypatch: pytest.MonkeyPatch, width: int = 80) -> list[str]:
    """Return the visible lines on a terminal of that width; no text from outside colours them."""
    file = io.StringIO()
    monkeypatch.setattr(
        terminal, "Console", lambda: Console(file=file, width=width, force_terminal=True, no_color=True)
    )
    terminal.print_results(results)
    assert "\x1b[31m" not in file.getvalue()
    return [line.rstrip() for line in Text.from_ansi(file.getvalue()).plain.splitlines()]


def test_where_a_session_is_doubtful_each_of_its_verdicts_is(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.OUTPUT, "is_verbose", True)
    calm = " ".join(printed(results, monkeypatch))
    assert "doubtful:" not in calm + story.summary(results)
    load = SystemLoad(others=0.83, stolen=0.0, free_bytes=2**30)
    disturbed = dataclasses.replace(results, system_load=load)
    lines = printed(disturbed, monkeypatch)
    text = "\n".join(lines)
    assert text.count("doubtful") > 8
    assert not re.search(r"\d\.\d\dx|faster|slower|equal within", text)
    assert any(line.startswith("No recommendation: the times are doubtful") for line in lines)
    assert [each.mark for shape in answers.shapes(disturbed) for each in shape.others if each.ratio] == (
        [Mark.doubtful] * 12
    )
    text = story.summary(disturbed)
    assert text.index("High CPU contention") < text.index("No recommendation")
    assert "| doubtful " in text
    assert not re.search(r"x (slower|faster)", text)
    page = story.page(disturbed)
    assert page.index("High CPU contention") < page.index('"doubtful"')


def test_every_cell_has_its_time_verdict_and_memory(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.OUTPUT, "is_verbose", True)
    text = "\n".join(printed(results, monkeypatch, 120))
    assert re.search(r"^length +implementation +time per call +verdict +peak memory$", text, re.MULTILINE)
    assert re.search(r"^512 +fused +\S+ ms \(.*\) +\d\.\d+x slower \(.*\) +1[67]\.?\d* MiB", text, re.MULTILINE)


def test_quiet_leaves_warnings_and_the_answer(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.OUTPUT, "is_quiet", True)
    lines = printed(results, monkeypatch, width=400)
    assert lines == [*story.troubles(results), story.verdict(results), *story.answer(results)]


def test_a_comparison_of_two_states_has_a_row_for_each_cell(tmp_path, monkeypatch):
    packed = Path(__file__).parents[1] / "data" / "golden" / "two_processes.jsonl.gz"
    (tmp_path / "journal.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))
    results = read(tmp_path)
    lines = printed(results, monkeypatch, 100)
    assert lines[0].startswith("virtual: Two states of the code: 2 implementations on 2 shapes")
    assert any(line.startswith("Base ") and "candidate " in line for line in lines)
    (heading,) = (line for line in lines if line.startswith("Time of a call"))
    assert heading.split()[-3:] == ["base", "equal", "slower"]
    text = "\n".join(lines)
    assert len(re.findall(r" candidate +-$", text, re.MULTILINE)) == 2
    assert len(re.findall(r" candidate \d\.\d\dx$", text, re.MULTILINE)) == 2
    assert story.findings(results) == []
    assert "Take " not in text  # the answer is the command's last line
