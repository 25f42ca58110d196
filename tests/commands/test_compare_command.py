"""`attnbench compare` on a real repository with real workers: exit codes, and remaining files."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attnbench.analysis.results import read
from attnbench.analysis.sides import by_side, losses
from attnbench.cli import app
from attnbench.commands import frame
from attnbench.processes import execution, sides
from attnbench.processes.execution import SHORT_SPIN, client_for
from attnbench.processes.messages import SampleBlocks
from attnbench.reports import endings, story
from attnbench.statistics.intervals import median
from attnbench.storage.events import VisitFinished
from attnbench.storage.journal import JOURNAL, find_run, find_runs
from attnbench.storage.records import PROBE
from tests.repositories import PLAIN, SLOW, WRONG, commit, git, repository

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
ASKING = """import os

from untracked import mine as plain


def mine(query, key, value, *, mask=None):
    for _ in range({"old": 1, "new": 40}[os.environ["WHOSE"]]):
        context = plain(query, key, value, mask=mask)
    return context
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    folder = repository(tmp_path_factory.mktemp("compared") / "theirs")
    spare = PLAIN.replace("def mine", "def spare")
    (folder / "tiny.toml").write_text(TINY)
    commit(folder, "plain", mine=PLAIN, helper=PLAIN, helped=HELPED, spare=spare)
    commit(folder, "slow", mine=SLOW, helper=SLOW)
    commit(folder, "wrong", mine=WRONG, spare=None)
    git(folder, "tag", "x<script>y", "plain")
    return folder


def compare(repo, *arguments):
    before = Path.cwd()
    os.chdir(repo)
    try:
        return CliRunner().invoke(app, ["compare", *arguments])
    finally:
        os.chdir(before)


def newest(repo):
    return read(find_run(None, repo / "results"))


def test_two_revisions_are_measured_and_nothing_of_them_is_left(repo, monkeypatch):
    def write_few(results, folder):
        return story.REPORT["markdown"].write(results, folder) == []

    monkeypatch.setattr("attnbench.commands.running.write_reports", write_few)
    found = compare(repo, "rev:x<script>y", "rev:slow", "-i", "mine.py:mine", *FAST, "--json")
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
    planned = sides.plan(base, candidate, fields, folder)
    return folder, planned


def test_each_side_computes_with_its_own_files_in_processes_of_its_own(repo, monkeypatch):
    for name in SHORT_SPIN:
        monkeypatch.delenv(name, raising=False)
    folder, planned = prepared(repo, monkeypatch, "rev:plain", "rev:slow", "helped.py:mine")
    assert planned.sides.is_apart
    (base, base_spec), (candidate, candidate_spec) = planned.specs.items()
    arms = ((candidate, candidate_spec), (base, base_spec), (base.as_control(), base_spec), (PROBE, ""))
    asked = SampleBlocks(workload=planned.workloads[0], arms=arms, epoch=0, number=0, num_blocks=2, seed=1)
    with sides.checked_out(planned, folder), client_for(planned, folder) as client:
        ready = client.start(0)
        taken = client.ask("sample_blocks", VisitFinished, visit=asked)
    assert ready.base.fingerprint == ready.environment.fingerprint
    assert ready.environment.settings.items() >= SHORT_SPIN.items()
    samples = {each.arm: each.samples for each in taken.arms}
    times = {arm: min(sample.value for sample in own) for arm, own in samples.items()}
    assert times[candidate] > 3 * times[base]  # forty times the work: another file was imported
    assert [(s.epoch, s.visit, s.block) for s in samples[candidate]] == [(0, 0, 0), (0, 0, 1)]


@pytest.mark.long
def test_two_environments_run_one_file_each_by_a_python_of_its_own(repo, tmp_path, monkeypatch):
    pythons = {}
    for whose in ("old", "new"):
        pythons[whose] = tmp_path / whose / "python"
        pythons[whose].parent.mkdir()
        pythons[whose].write_text(f'#!/bin/sh\nWHOSE={whose} exec {shlex.quote(sys.executable)} "$@"\n')
        pythons[whose].chmod(0o755)
    for name, text in (("asking", ASKING), ("untracked", PLAIN)):
        (repo / f"{name}.py").write_text(text)
    folder, planned = prepared(repo, monkeypatch, *map(str, pythons.values()), "asking.py:mine")
    assert planned.sides.is_apart
    with sides.checked_out(planned, folder):
        execution.execute(planned, folder, lambda _: None)
    results = read(folder)
    assert {record.status for record in results.records} == {"ok"}
    base, candidate = by_side(results)
    times = [median(s.value for s in one.measurement("latency").samples) for (one,) in (base, candidate)]
    assert times[1] > 3 * times[0]


def test_a_candidate_that_is_wrong_or_lacks_the_file_is_a_finding(repo, monkeypatch):
    folder, planned = prepared(repo, monkeypatch, "rev:plain", "rev:wrong", "mine.py:mine", "spare.py:spare")
    with sides.checked_out(planned, folder):
        execution.execute(planned, folder, lambda _: None)
    results = read(folder)
    with pytest.raises(typer.Exit) as left:
        frame.finish(endings.of_sides(results))
    assert left.value.exit_code == 1
    lost, wrong = losses(results)
    assert lost == "lost: spare: cannot read spare.py: No such file or directory"
    assert wrong.startswith("disagrees: mine on attention-inference")
    assert "(the base: ok)" in wrong
    assert all(not record.measurement("latency") for record in results.records)


@pytest.mark.long
def test_a_resumed_comparison_needs_both_sides_again(repo, monkeypatch):
    folder, planned = prepared(repo, monkeypatch, "rev:plain", "rev:slow", "mine.py:mine")
    with sides.checked_out(planned, folder):
        execution.execute(planned, folder, lambda _: None, stages=("check",))
    both = [planned.sides.base.given, planned.sides.candidate.given]
    for words in ([], both[::-1]):
        found = compare(repo, *words, "--resume", folder.name)
        assert shlex.join(["attnbench", "compare", *both, "--resume", folder.name]) in str(found.exception)
    assert compare(repo, *both, "--resume", folder.name).exit_code in {0, 1, 3}


def test_a_killed_comparison_leaves_no_worktree_and_is_resumed(repo, monkeypatch):
    program = [PYTHON, "-P", "-m", "attnbench", "compare", "rev:plain", "rev:slow", "-i", "mine.py:mine", *FAST]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "harness")}
    known = set(find_runs(repo / "results"))
    process = subprocess.Popen(program, cwd=repo, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    folder = None
    while folder is None and process.poll() is None:
        time.sleep(0.02)
        begun = (run for run in find_runs(repo / "results") if (run / JOURNAL).stat().st_size)
        folder = next(iter(set(begun) - known), None)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = folder / "sides"
    assert (left / "base" / "mine.py").read_text() == PLAIN
    assert git(repo, "worktree", "list").count("\n") == 1
    monkeypatch.chdir(repo)
    planned = read(folder).plan
    with sides.checked_out(planned, folder):
        execution.execute(planned, folder, lambda _: None, stages=("check",))
    results = read(folder)
    assert not left.exists()
    assert results.elapsed_s is not None
    assert {record.status for record in results.records} == {"ok"}
