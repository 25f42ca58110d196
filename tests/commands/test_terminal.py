"""A terminal of 80 columns: whole words, warnings before results, a legend below each question mark."""

import dataclasses
import fcntl
import gzip
import io
import os
import re
import struct
import subprocess
import termios
from functools import partial
from pathlib import Path

import msgspec
import pytest
import typer
from rich.console import Console
from rich.text import Text

from attnbench import console, plugins
from attnbench.analysis.conclusion import Mark
from attnbench.analysis.results import Results, read
from attnbench.analysis.sanity import SystemLoad
from attnbench.commands import OUTPUT, ExitCode, running, terminal
from attnbench.commands import list as listing
from attnbench.reports import answers, summary
from attnbench.storage import older
from attnbench.storage.records import Status
from tests import forks, journals

POINTS = journals.workloads(mask=("none", "causal"), seq_len=(128, 512))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return journals.write(tmp_path_factory.mktemp("run"), POINTS, ("sdpa", "fused", "bmm", journals.EVIL))


def printed(results: Results, monkeypatch: pytest.MonkeyPatch, width: int = 80) -> list[str]:
    """Return the visible lines on a terminal of that width; no text from outside colours them."""
    file = io.StringIO()
    made = partial(Console, file=file, width=width, force_terminal=True, no_color=True)
    for module in (terminal, console):
        monkeypatch.setattr(module, "Console", made)
    terminal.print_results(results)
    assert "\x1b[31m" not in file.getvalue()
    return [line.rstrip() for line in Text.from_ansi(file.getvalue()).plain.splitlines()]


def test_where_a_session_is_doubtful_each_of_its_verdicts_is(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.OUTPUT, "is_verbose", True)
    calm = " ".join(printed(results, monkeypatch))
    assert "doubtful:" not in calm + summary.markdown(results)
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
    text = summary.markdown(disturbed)
    assert text.index("High CPU contention") < text.index("No recommendation")
    assert "| doubtful " in text
    assert not re.search(r"x (slower|faster)", text)
    page = summary.html_page(disturbed)
    assert page.index("High CPU contention") < page.index('"doubtful"')


def test_quiet_leaves_warnings_and_the_answer(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.OUTPUT, "is_quiet", True)
    lines = printed(results, monkeypatch, width=400)
    assert lines == [*summary.troubles(results), summary.verdict(results), *summary.answer(results)]


def test_a_cell_that_needs_too_much_memory_is_told_from_a_slow_one(results, capsys):
    record = msgspec.structs.replace(results.records[0], status=Status.out_of_memory, is_predicted=True)
    terminal.print_findings(dataclasses.replace(results, records=(record,)))
    assert "too much memory" in capsys.readouterr().out


def test_a_comparison_of_two_states_has_a_row_for_each_cell(tmp_path, monkeypatch):
    packed = Path(__file__).parents[1] / "data" / "golden" / "two_processes.jsonl.gz"
    (tmp_path / "journal.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))
    older.convert(tmp_path / "journal.jsonl")
    results = read(tmp_path)
    lines = printed(results, monkeypatch, 100)
    assert lines[0].startswith("virtual: Two states of the code: 2 implementations on 2 shapes")
    assert any(line.startswith("Base ") and "candidate " in line for line in lines)
    (heading,) = (line for line in lines if line.startswith("Time of a call"))
    assert heading.split()[-3:] == ["base", "candidate", "verdict"]
    text = "\n".join(lines)
    assert len(re.findall(r" (?:equal|undecided)$", text, re.MULTILINE)) == 2  # its controls have no use today
    assert len(re.findall(r" slower \d\.\d\dx$", text, re.MULTILINE)) == 2
    assert summary.findings(results) == []
    assert "Take " not in text  # the answer is the command's last line


PROGRESS = """
from attnbench.console import watching
from attnbench.processes.execution import Progress

with watching() as watch:
    counts = {"ok": 103, "unsupported": 7, "timeout": 2}
    cell = "sdpa_flash on attention-inference-cpu-float32-b1-t2048-h8-k64-causal"
    for stage in ("check", "time"):
        watch(Progress(stage=stage, cell=cell, done=4, total=10, counts=counts, left_s=200.0))
"""


def test_a_terminal_of_80_columns_has_room_for_the_share_and_the_time_left():
    screen, end = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    subprocess.run([forks.python(), "-c", PROGRESS], stderr=end, env=environment, check=True)
    os.close(end)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(screen, 2**16).decode())
    os.close(screen)
    lines = re.split(r"[\r\n]+", shown)
    assert max(map(len, lines)) <= 80
    for stage in ("checking", "timing"):
        assert any(re.match(rf"{stage} 40 %, about 3:20 left, cells: 103 ok 2 timeout", line) for line in lines), lines


def test_a_table_of_many_lengths_fits_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(terminal.OUTPUT, "is_verbose", True)
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192)
    terminal.print_results(journals.write(tmp_path, journals.workloads(seq_len=lengths), ("sdpa", "fused", "bmm")))
    printed = capsys.readouterr().out.splitlines()
    table = printed[: next(place for place, line in enumerate(printed) if line.startswith("Time of a call"))]
    assert max(map(len, table)) <= 80
    assert all(sum(line.startswith(f"{length} ") for line in table) == 3 for length in lengths)


def test_an_interruption_prints_how_to_continue(capsys):
    with pytest.raises(typer.Exit) as ends, running.interruptible("go on with: attnbench run --resume x"):
        raise KeyboardInterrupt
    assert ends.value.exit_code == ExitCode.interrupted
    assert capsys.readouterr().err == "go on with: attnbench run --resume x\n"


def test_an_interrupted_run_prints_its_table_so_far_and_ends_with_130(tmp_path, monkeypatch, capsys):
    def interrupted(_, folder, *__, **___):
        journals.write(folder, journals.USUAL[:2], ("sdpa", "fused"), num_epochs=2, is_finished=False)
        raise KeyboardInterrupt

    monkeypatch.setattr(running.execution, "execute", interrupted)
    plan = journals.planned(journals.USUAL[:2], ("sdpa", "fused"))
    with pytest.raises(typer.Exit) as ends:
        running.measure(plan, tmp_path / "run")
    assert ends.value.exit_code == ExitCode.interrupted
    printed = capsys.readouterr()
    assert "This run did not finish" in printed.out
    assert re.search(r"^T=128 .* us ", printed.out, re.MULTILINE), printed.out
    assert "continue with: attnbench run --resume" in printed.err
    assert (tmp_path / "run" / "summary.md").exists()


def test_every_no_has_its_reason_and_each_implementation_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    entries = listing.implementations(plugins.implementation_names())
    assert {entry["implementation"] for entry in entries} >= set(plugins.stems(plugins.PACKAGE))
    for entry in entries:
        answers = {entry[column] for column in listing.QUESTIONS}
        assert answers <= {"yes", "no"}
        assert bool(entry["why"]) is ("no" in answers)
    listing.print_support(entries)
    table, _, absent = capsys.readouterr().out.partition("Not here:")
    assert re.search("^sdpa +softcap$", table, re.MULTILINE)
    assert all(entry["implementation"] in (table if "yes" in entry.values() else absent) for entry in entries)
    monkeypatch.setattr(OUTPUT, "is_verbose", True)
    listing.print_support(entries)
    printed = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(entry["why"].split()) in printed for entry in entries)
