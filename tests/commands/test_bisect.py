"""`attnbench compare ... --bisect` exits as `git bisect run` wants it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from attnbench.analysis.conclusion import Conclusion, Ending
from attnbench.cli import app
from attnbench.commands import compare, running
from attnbench.reports import endings
from tests.repositories import PLAIN, WRONG, commit, repository
from tests.test_cli import command

AXES = ("seq_len=16", "mask=none", "scope=attention", "direction=inference", "dtype=float32")
OPTIONS = ["-i", "mine.py:mine", *(f"--set={axis}" for axis in AXES), "--budget", "0", "--bisect"]


@pytest.mark.parametrize(("text", "code"), [(WRONG, 1), ("def other(query, key, value): ...\n", 125)])
def test_a_wrong_state_is_bad_and_one_without_the_function_is_passed_over(tmp_path, text, code):
    folder = repository(tmp_path / "history")
    commit(folder, "good", mine=PLAIN)
    (folder / "mine.py").write_text(text)
    done = command("compare", "rev:good", "rev:WORKTREE", *OPTIONS, cwd=folder)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize(("ending", "code"), [("passed", 0), ("finding", 1), ("inconclusive", 125), ("invalid", 125)])
def test_what_is_inconclusive_or_invalid_is_passed_over(monkeypatch, ending, code):
    answered = SimpleNamespace(records=[SimpleNamespace(status="ok", arm=SimpleNamespace(side="candidate"))])
    monkeypatch.setattr(compare, "_measured", lambda *_: answered)
    monkeypatch.setattr(endings, "of_sides", lambda _: Conclusion(ending=Ending[ending], words=""))
    monkeypatch.setattr(running, "print_report", lambda *_: None)
    assert CliRunner().invoke(app, ["compare", "rev:good", "rev:WORKTREE", "--bisect"]).exit_code == code


def test_a_mistake_in_the_sides_is_passed_over():
    assert CliRunner().invoke(app, ["compare", "rev:good", "--bisect"]).exit_code == 125


@pytest.mark.long
def test_a_planted_history_of_16_commits_ends_at_the_right_one():
    """With real times: the tenth commit computes the scores four times."""
    program = Path(__file__).parents[2] / "examples" / "planted_history.py"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, program], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(Version 10), git's exit code 0" in done.stdout
