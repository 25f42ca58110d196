"""Shared parts of the commands that run something."""

import fcntl
import os
import re
import struct
import subprocess
import termios

import pytest
import typer

from attnbench.commands import ExitCode, running, terminal
from tests import forks, journals

PROGRESS = """
from attnbench.commands.running import watching
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
        assert any(re.match(rf"{stage} 40 %, about 3:20 left, 103 ok 2 timeout", line) for line in lines), lines


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
