"""`attnbench compare` on a real repository with real workers: exit codes, and what is left behind."""

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

from attnbench.analysis.comparisons import by_side, losses
from attnbench.analysis.results import read
from attnbench.cli import app
from attnbench.commands.compare import conclude
from attnbench.processes import execution, sides
from attnbench.processes.execution import SHORT_SPIN, client_for
from attnbench.processes.messages import SampleBlocks
from attnbench.processes.planning import Selection
from attnbench.reports import sides as beside
from attnbench.reports import story
from attnbench.reports.sides import document
from attnbench.statistics.intervals import median
from attnbench.storage.journal import JOURNAL, find_runs, newest_run
from attnbench.storage.records import PROBE
from tests import forks
from tests.repositories import PLAIN, SLOW, WRONG, commit, git, repository

pytestmark = pytest.mark.usefixtures("forked_workers")

PYTHON = sys.executable  # a process of its own, that can be killed with its group
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
    return read(newest_run(repo / "results"))


def test_two_revisions_are_measured_and_nothing_of_them_is_left(repo, monkeypatch):
    def write_few(results, folder):
        return [report.write(results, folder) for report in (beside.REPORT, story.REPORT["markdown"])] == []

    monkeypatch.setattr("attnbench.commands.running.write_reports", write_few)
    found = compare(repo, "rev:x<script>y", "rev:slow", "-i", "mine.py:mine", *FAST, "--json")
    results = newest(repo)
    reported = json.loads(found.stdout)
    assert found.exit_code in {1, 3}  # how fast it was decides nothing here
    assert reported["findings"] == []
    assert reported["suite"]["ratio"] > 0
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
    text = (results.folder / "sides.md").read_text()
    assert "x&lt;script&gt;y" in text
    assert "<script>" not in text + (results.folder / "summary.md").read_text()


def prepared(repo, monkeypatch, base, candidate, *implementations, build=""):
    """Folder and plan of a comparison, as the command makes them."""
    monkeypatch.chdir(repo)
    selection = Selection(sweep="tiny.toml", implementations=implementations)
    folder = execution.new_folder(Path("results"), "compare")
    planned, _ = sides.plan(base, candidate, selection, folder, build=build)
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
        taken = client.ask(asked)
    assert ready.base.fingerprint == ready.environment.fingerprint
    assert ready.environment.settings.items() >= SHORT_SPIN.items()
    samples = {each.arm: each.samples for each in taken.arms}
    times = {arm: min(sample.value for sample in own) for arm, own in samples.items()}
    assert times[candidate] > 3 * times[base]  # forty times the work: another file was imported
    assert [(s.epoch, s.visit, s.block) for s in samples[candidate]] == [(0, 0, 0), (0, 0, 1)]


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
        conclude(results)
    assert left.value.exit_code == 1
    lost, wrong = losses(results)
    assert lost == "lost: spare: cannot read spare.py: No such file or directory"
    assert wrong.startswith("disagrees: mine on attention-inference")
    assert "(the base: ok)" in wrong
    assert all(not record.measurement("latency") for record in results.records)
    text = document(results)
    assert "lost: spare" in text
    assert "disagrees" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rev:plain"], "give two sides, BASE and CANDIDATE"),
        (["rev:plain", "rev:slow", "-i", "mine.py:mine", "--set", "colour=red"], "there is no axis colour"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(repo, arguments, said):
    program = [forks.python(), "-P", "-m", "attnbench", "compare", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "harness")}
    runs = set(find_runs(repo / "results"))
    found = subprocess.run(program, cwd=repo, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert said in found.stderr
    assert found.stderr.count("\n") == 1
    assert set(find_runs(repo / "results")) == runs


BUILDER = """import pathlib
import sys

print("building")
pathlib.Path("built.py").write_text(pathlib.Path("source.txt").read_text())
sys.exit(int(pathlib.Path("code.txt").read_text()))
"""
BUILD = f"{shlex.quote(sys.executable)} builder.py"


@pytest.fixture(scope="module")
def to_build(tmp_path_factory):
    """A repository whose implementation is not there before a command has made it."""
    folder = repository(tmp_path_factory.mktemp("built") / "theirs")
    (folder / "tiny.toml").write_text(TINY)
    (folder / ".gitignore").write_text("built.py\n")
    (folder / "builder.py").write_text(BUILDER)
    for tag, text, code in (("plain", PLAIN, 0), ("slow", SLOW, 0), ("broken", SLOW, 7)):
        (folder / "source.txt").write_text(text)
        (folder / "code.txt").write_text(str(code))
        commit(folder, tag, using="from built import mine\n")
    return folder


def test_what_must_be_built_is_built_for_each_revision(to_build, monkeypatch, capfd):
    folder, planned = prepared(to_build, monkeypatch, "rev:plain", "rev:slow", "using.py:mine", build=BUILD)
    assert capfd.readouterr().err == 2 * "building\n"
    assert planned.sides.is_apart
    with sides.checked_out(planned, folder):
        texts = [(folder / "sides" / name / "built.py").read_text() for name in ("base", "candidate")]
        execution.execute(planned, folder, lambda _: None, stages=("check",))
    results = read(folder)
    assert texts == [PLAIN, SLOW]
    assert {record.status for record in results.records} == {"ok"}
    assert not (folder / "sides").exists()
    (folder / "sides" / "base").mkdir(parents=True)  # as a kill amid its build leaves it
    (folder / "sides" / sides.OWNER).write_text(str(2**22 + 1))
    with sides.checked_out(planned, folder):
        assert (folder / "sides" / "base" / "built.py").read_text() == PLAIN
    sides_given = [planned.sides.base.given, planned.sides.candidate.given]
    for asked in ([], ["--build", "true"], sides_given, [*sides_given[::-1], "--build", BUILD]):
        found = compare(to_build, *asked, "--resume", folder.name)
        assert "a journal does not decide which sides are compared, nor how they are built" in str(found.exception)
        again = shlex.join(["attnbench", "compare", *sides_given, "--resume", folder.name, "--build", BUILD])
        assert again in str(found.exception)
    found = compare(to_build, *sides_given, "--resume", folder.name, "--build", BUILD)
    assert found.exit_code in {0, 1, 3}


def test_the_same_text_may_import_what_was_built(to_build, monkeypatch):
    """Without --implementation what is the same on both sides is left out; a text does not show all that it uses."""
    (to_build / "implementations").mkdir()
    (to_build / "implementations" / "other.py").write_text(f"{PLAIN}\n\nIMPLEMENTATION = mine\n")
    git(to_build, "add", "--all")
    git(to_build, "commit", "--quiet", "--message", "other")
    for build, names in (("", []), (BUILD.replace("builder.py", "-c pass"), ["other (base)", "other"])):
        folder, planned = prepared(to_build, monkeypatch, "rev:HEAD", "rev:HEAD", build=build)
        sides.remove_checkouts(folder)
        assert list(map(str, planned.specs if planned else ())) == names


@pytest.mark.parametrize(
    ("base", "candidate", "build", "said"),
    [
        ("rev:plain", "rev:broken", BUILD, "rev:broken cannot be built"),
        ("rev:plain", "rev:slow", "no-such-program", "rev:plain cannot be built by no-such-program: "),
        ("rev:plain", "rev:slow", "'", "rev:plain cannot be built by ': No closing quotation"),
        (".", ".", BUILD, "--build is for revisions"),
        ("using.py:mine", "using.py:mine", BUILD, "--build is for revisions"),
    ],
)
def test_a_build_that_fails_or_cannot_be_leaves_nothing(to_build, base, candidate, build, said):
    known = set((to_build / "results").glob("runs/*"))
    more = [] if "mine" in base else ["-i", "using.py:mine"]
    found = compare(to_build, base, candidate, *more, *FAST, "--build", build)
    assert isinstance(found.exception, ValueError)
    assert said in str(found.exception)
    assert set((to_build / "results").glob("runs/*")) == known


def test_a_killed_comparison_leaves_no_worktree_and_is_swept_up_or_resumed(repo, monkeypatch):
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
    sides.remove_abandoned(repo / "results")
    assert not left.exists()
    monkeypatch.chdir(repo)
    planned = read(folder).plan
    with sides.checked_out(planned, folder):
        sides.remove_abandoned(repo / "results")
        assert (left / "base" / "mine.py").read_text() == PLAIN  # ours, and at work
        execution.execute(planned, folder, lambda _: None, stages=("check",))
    results = read(folder)
    assert not left.exists()
    assert results.elapsed_s is not None
    assert {record.status for record in results.records} == {"ok"}
