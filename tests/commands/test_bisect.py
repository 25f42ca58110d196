"""`attnbench compare ... --bisect` exits as `git bisect run` wants it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.processes import sides
from tests.test_cli import command

RIGHT = """
def attention(query, key, value, *, scale=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return (query @ key.mT * scale).softmax(-1) @ value
"""
OPTIONS = "-i mine.py:attention --set seq_len=16 --set mask=none --set scope=attention --budget 0 --bisect"


def git(folder, *arguments: str) -> str:
    given = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, check=True).stdout


def commit(folder, subject: str, text: str) -> None:
    (folder / "mine.py").write_text(f"# {subject}\n{text}")
    git(folder, "add", "mine.py")
    git(folder, "commit", "-qm", subject)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Three commits: right, wrong, and without the function."""
    folder = tmp_path_factory.mktemp("history")
    git(folder, "init", "-q")
    commit(folder, "right", RIGHT)
    git(folder, "tag", "good")
    return folder


@pytest.mark.parametrize(
    ("text", "code"), [(RIGHT.replace("* scale", "* scale * 1.1"), 1), ("def other(query, key, value): ...\n", 125)]
)
def test_a_wrong_state_is_bad_and_one_without_the_function_is_passed_over(history, text, code):
    (history / "mine.py").write_text(text)
    done = command("compare", "rev:good", "rev:WORKTREE", *shlex.split(OPTIONS), cwd=history)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    ("ended", "code"), [(0, 0), (1, 1), (2, 2), (3, 125), (4, 125), (130, 130), (ValueError("no such revision"), 125)]
)
def test_what_is_inconclusive_invalid_or_missing_is_passed_over(monkeypatch, ended, code):
    def run(*_, **__):
        raise ended if isinstance(ended, Exception) else typer.Exit(ended)

    monkeypatch.setattr(sides, "plan", run)
    found = CliRunner().invoke(app, ["compare", "rev:good", "rev:WORKTREE", "--bisect"])
    assert found.exit_code == code


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
