"""Subprocesses of studies import from the same places: studies extend PYTHONPATH without removing entries."""

import os
import sys

import pytest

from attnbench.processes.worker_client import ROOT
from studies import first_answer
from studies.acceptance.sessions import Engine

STARTS = {
    "a session of acceptance": lambda folder: Engine.of("").run(["-c", "pass"], folder),
    "a command that is timed": lambda _: first_answer.timed(ROOT, ["list"]),
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
    assert "harness" in folders[0] or folders[0].startswith(str(ROOT))
    assert folders[1:][-1:] == [str(tmp_path / "dependencies")]
