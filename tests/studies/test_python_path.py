"""Subprocesses of studies import from the same places: studies extend PYTHONPATH without removing entries."""

import os
import sys
from pathlib import Path

import pytest

from studies import first_answer
from studies.acceptance.sessions import run_python

STARTS = {
    "a session of acceptance": lambda folder: run_python(["-c", "pass"], folder),
    "a command that is timed": lambda _: first_answer.timed("sdpa"),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_what_was_added_to_the_path_of_modules_is_passed_on(start, tmp_path, monkeypatch):
    noted = tmp_path / "noted"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nprintf %s "$PYTHONPATH" > {noted}\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "dependencies"))
    start(tmp_path)
    folders = noted.read_text(encoding="utf-8").split(os.pathsep)
    assert "harness" in folders[0] or Path(folders[0], "attnbench").is_dir()
    assert folders[1:][-1:] == [str(tmp_path / "dependencies")]
