"""`attnbench compare` on a real repository with real workers: exit codes, and remaining files."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from attnbench.analysis.conclusion import Conclusion, Ending
from attnbench.analysis.results import read
from attnbench.cli import app
from attnbench.commands import compare, running
from attnbench.processes import execution, revisions
from attnbench.processes.execution import client_for
from attnbench.processes.messages import SampleBlocks
from attnbench.reports import exit_status, summary
from attnbench.storage.events import VisitFinished
from attnbench.storage.journal import find_run
from attnbench.storage.records import PROBE
from tests.repositories import PLAIN, SLOW, WRONG, commit, git, repository
from tests.test_cli import command

pytestmark = pytest.mark.usefixtures("forked_workers")

PYTHON = sys.executable  # its own session, so that it can be killed with its group
ROOT = Path(__file__).parents[2]
TINY = """summary = "as small as can be"
budget_s = 0.0
metrics = ["latency", "peak_memory"]

[[grid]]
seq_len = 16
num_heads = 2
head_dim = 8
direction = "inference"
num_threads = 1
"""
FAST = ["--sweep", "tiny.toml"]
HELPED = "from helper import mine as helped\n\nmine = helped\n"
RAISING = PLAIN.replace("    scores =", "    raise RuntimeError('of this helper')\n    scores =")


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    folder = repository(tmp_path_factory.mktemp("compared") / "theirs")
    spare = PLAIN.replace("def mine", "def spare")
    (folder / "tiny.toml").write_text(TINY)
    commit(folder, "plain", mine=PLAIN, helper=PLAIN, helped=HELPED, spare=spare)
    commit(folder, "slow", mine=SLOW, helper=SLOW)
    commit(folder, "raising", helper=RAISING)
    commit(folder, "wrong", mine=WRONG, helper=SLOW, spare=None)
    git(folder, "tag", "x<script>y", "plain")
    return folder


def compared(repo, *arguments):
    before = Path.cwd()
    os.chdir(repo)
    try:
        return CliRunner().invoke(app, ["compare", *arguments])
    finally:
        os.chdir(before)


def newest(repo):
    return read(find_run(None, repo / "results"))


def test_two_revisions_are_measured_and_nothing_of_them_is_left(repo, monkeypatch):
    def write_few(results):
        return summary.REPORT["markdown"].write(results, results.folder) == []

    monkeypatch.setattr("attnbench.commands.running.write_reports", write_few)
    found = compared(repo, "rev:x<script>y", "rev:slow", "-i", "mine.py:mine", *FAST, "--json")
    results = newest(repo)
    reported = json.loads(found.stdout)
    assert found.exit_code in {1, 3}  # its speed does not matter here
    assert reported["command"] == "compare"
    assert reported["together"]["speedup"] > 0
    assert [cell["verdict"] for cell in reported["cells"]] == ["right", "right"]
    judged = reported["implementations"]["mine"]
    assert (judged["is_right"], judged["num_compared"], judged["num_planned"]) == (True, 1, 1)
    assert sorted((cell["implementation"], cell["side"]) for cell in reported["cells"]) == [
        ("mine", "base"),
        ("mine", "candidate"),
    ]
    assert {record.status for record in results.records} == {"ok"}
    assert all(record.measurement("latency").samples for record in results.records)
    assert all(record.measurement("peak_memory") for record in results.records)
    assert not (results.folder / "sides").exists()
    assert git(repo, "worktree", "list").count("\n") == 1
    assert git(repo, "status", "--porcelain", "--untracked-files=no") == ""
    text = (results.folder / "summary.md").read_text()
    assert "Base rev:x&lt;script&gt;y" in text
    assert "<script>" not in text


def prepared(repo, monkeypatch, base, candidate, *implementations):
    """Prepare folder and plan of a comparison as the command does."""
    monkeypatch.chdir(repo)
    fields = {"sweep": "tiny.toml", "implementations": implementations}
    folder = execution.new_folder(Path("results"), "compare")
    planned = revisions.plan(base, candidate, fields, folder)
    return folder, planned


@pytest.mark.parametrize("revision", ["slow", "raising"])
def test_each_side_computes_with_its_own_files_in_processes_of_its_own(repo, monkeypatch, revision):
    folder, planned = prepared(repo, monkeypatch, "rev:plain", f"rev:{revision}", "helped.py:mine")
    assert planned.sides.is_apart
    (base, base_spec), (candidate, candidate_spec) = planned.specs.items()
    arms = ((candidate, candidate_spec), (base, base_spec), (PROBE, ""))
    asked = SampleBlocks(workload=planned.workloads[0], arms=arms, epoch=0, number=0, num_blocks=2, seed=1)
    with revisions.checked_out(planned, folder), client_for(planned, folder) as client:
        ready = client.start(0)
        taken = client.ask("sample_blocks", VisitFinished, visit=asked)
    assert ready.base.fingerprint == ready.environment.fingerprint
    if revision == "raising":
        assert (taken.arm, "of this helper" in taken.message) == (candidate, True)
        return
    samples = {each.arm: each.samples for each in taken.arms}
    assert [(s.epoch, s.visit, s.block) for s in samples[candidate]] == [(0, 0, 0), (0, 0, 1)]


@pytest.mark.long
def test_a_resumed_comparison_needs_both_sides_again(repo, monkeypatch):
    folder, planned = prepared(repo, monkeypatch, "rev:plain", "rev:slow", "mine.py:mine")
    with revisions.checked_out(planned, folder):
        execution.execute(planned, folder, lambda _: None, stages=("check",))
    both = [planned.sides.base.given, planned.sides.candidate.given]
    for words in ([], both[::-1]):
        found = compared(repo, *words, "--resume", folder.name)
        assert shlex.join(["attnbench", "compare", *both, "--resume", folder.name]) in str(found.exception)
    assert compared(repo, *both, "--resume", folder.name).exit_code in {0, 1, 3}


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
    monkeypatch.setattr(exit_status, "of_sides", lambda _: Conclusion(ending=Ending[ending], words=""))
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
