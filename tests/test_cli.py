"""The command line as users meet it: output, files, refusals and exit codes."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench import cli, samples, table
from attnbench.commands import RETIRED, ExitCode
from tests import forks, journals
from tests.repositories import PLAIN

ROOT = Path(__file__).parents[1]
AXES = ("seq_len=16", "num_heads=2", "head_dim=8", "dtype=float32", "mask=causal", "direction=inference")
SMALL = [f"--set={axis}" for axis in (*AXES, "batch_size=1", "scope=attention")]


def command(*arguments: str, cwd: Path, program: tuple[str, ...] = ("-m", "attnbench"), **variables: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "harness"), "COLUMNS": "160", **variables}
    python = sys.executable if variables or "-c" in program else forks.python()  # these inspect imports
    return subprocess.run(
        [python, *program, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def called(called, tmp_path, monkeypatch):
    """Call the command in this process and an empty folder; return its output and its exit code."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in cli.SIGNALS}
    yield called
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Run with a file from outside the repository, in a folder of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "mine.py").write_text(f"{PLAIN}\n\ndef other(query, key, value): ...\n")
    found = command("run", "-i", "mine.py:mine", "-i", "fused", *SMALL, "--budget", "0", cwd=folder)
    (run,) = (folder / "results" / "runs").iterdir()
    return folder, found, run


def test_a_file_from_outside_is_checked_timed_and_plotted(theirs):
    _, found, run = theirs
    assert found.returncode in {0, 3}, found.stderr  # 3: the machine was too busy for a verdict
    assert "mine" in found.stdout
    frame = table(run)
    own = frame[frame.implementation == "mine"]
    assert set(own.status) == {"ok"}
    assert (own.latency_s > 0).all()
    assert (own.error_ratio < 1).all()
    assert own.ratio.notna().all()  # relative to sdpa, which is added automatically
    names = {file.name for file in run.iterdir()}
    assert not any(name.endswith(("_plot.png", "_plot.svg")) for name in names)
    assert {"records.csv", "summary.md", "picture.png", "report.html", "journal.jsonl"} <= names
    assert all("mine" in (run / name).read_text() for name in ("summary.md", "report.html"))
    assert len(samples(run)) > len(frame)
    with (run / "records.csv").open() as file:
        assert {row["implementation"] for row in csv.DictReader(file)} == {"mine", "fused", "sdpa"}


def test_reports_are_rebuilt_without_torch_from_a_journal_anywhere(theirs):
    folder, _, run = theirs
    blocker = folder / "blocked"
    (blocker / "torch").mkdir(parents=True)
    (blocker / "torch" / "__init__.py").write_text("raise ImportError('torch is blocked')\n")
    path = f"{blocker}{os.pathsep}{ROOT / 'harness'}"
    found = command("report", "--to", "gallery/mine", cwd=folder, PYTHONPATH=path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1].endswith("complete in one file: gallery/mine/report.html")
    again = command("report", "gallery/mine", cwd=folder, PYTHONPATH=path)
    assert again.returncode == 0, again.stderr
    assert {"picture.png", "report.html"} <= {file.name for file in (folder / "gallery" / "mine").iterdir()}
    program = ("-c", f"import attnbench; print(len(attnbench.table({str(run)!r})))")
    assert command(cwd=folder, program=program, PYTHONPATH=path).stdout.strip() == str(len(table(run)))
    assert "torch is blocked" in command(cwd=folder, program=("-c", "import torch"), PYTHONPATH=path).stderr


def test_a_run_that_ended_can_be_resumed_and_says_no_more(theirs):
    folder, _, run = theirs
    before = len(samples(run))
    found = command("run", "--resume", run.name, "-i", "mine.py:mine", "--json", cwd=folder)
    assert found.returncode in {0, 3}, found.stderr  # 3: the machine was too busy for a verdict
    assert json.loads(found.stdout)["counts"] == {"ok": before and len(table(run))}
    assert len(samples(run)) == before


def test_a_journal_does_not_decide_what_is_executed(theirs, called, monkeypatch):
    folder, _, run = theirs
    monkeypatch.chdir(folder)
    for named in ([], ["-i", "fused"], ["-i", "mine.py:other"], ["-i", "other/mine.py:mine"]):
        found = called("run", "--resume", run.name, *named)
        assert found.returncode == 2
        assert "this one names mine.py:mine" in found.stderr
        assert "type attnbench run --resume RUN -i mine.py:mine if you trust it" in " ".join(found.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--set", "seq_length=3"], "did you mean seq_len?"),
        (["run", "-i", "fusde"], "did you mean fused?"),
        (["run", "--results", "file/below", "-i", "sdpa"], "choose another folder with --results"),
        (["run", "--resume", "nothing"], "there is no run nothing"),
        (["run", "--resume", "nothing", "--set", "seq_len=3", "--budget", "3"], "leave out --budget, --set"),
        (["run", "--budget", "inf"], "inf is not a duration: write it as 90, 90s, 2min or 1h"),
        (["run", "--smallest-effect", "2"], "as in 0.02 for 2 %"),
        (["run", "--conditions", "hot"], "there is no condition hot"),
        (["check", "mine.py"], "cannot read mine.py"),
        (["report"], "begin with attnbench run"),
        (["run", "--budget", "-1"], "Invalid value"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(tmp_path, called, arguments, said):
    (tmp_path / "file").write_text("in the way")
    found = called(*arguments)
    assert found.returncode == 2
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    if "Usage" not in found.stderr:
        assert len(found.stderr.strip().splitlines()) <= 2  # a run may have printed its heading first
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "arguments",
    [["report"], ["gate"], ["history"], ["run", "--resume"], ["report", "--salvage"], ["gate", "--accept"]],
    ids=" ".join,
)
def test_what_cannot_be_read_ends_every_command_alike(tmp_path, called, arguments):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "journal.jsonl").write_text("nonsense\n")
    found = called(*arguments, "damaged", *(["--reason", "it is a test"] if "--accept" in arguments else []))
    assert (found.returncode, "line 1: not an event" in found.stderr) == (4, True), found.stderr
    assert found.stderr.startswith("invalid session: ")
    assert found.stderr.count("\n") == 1


def test_nothing_checked_is_no_pass(called, monkeypatch):
    monkeypatch.setattr(sys, "executable", forks.python())
    found = called("check", "torch_mha", *SMALL)
    assert found.returncode == 3
    assert found.stdout.splitlines()[-1].startswith("inconclusive: ")


def test_help_needs_no_heavy_module(tmp_path):
    code = (
        "import sys\nfrom attnbench.cli import app\n"
        "for name in ('', 'run', 'check', 'report', 'inspect'):\n"
        "    try: app([*name.split(), '--help'])\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'pandas', 'matplotlib', 'scipy', 'jinja2'} & set(sys.modules)))"
    )
    found = command(cwd=tmp_path, program=("-c", code))
    assert found.stdout.rstrip().endswith("[]"), found.stderr
    assert found.stdout.count("--help") >= 5


@pytest.mark.parametrize("what", ["sweeps", "axes", "masks", "models", "metrics", "reports"])
def test_everything_can_be_listed(called, what):
    entries = json.loads(called("list", what, "--json").stdout)
    assert entries
    assert all(value for entry in entries for value in entry.values())


INTERRUPTED_IN_A_STRING = """
import sys
from attnbench import cli

def program(**_):
    exec("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)")

cli.typer.main.get_command = lambda _: program
sys.argv = ["attnbench", "none"]
cli.main()
"""


def test_a_signal_inside_executed_text_still_ends_with_its_own_exit_code(tmp_path):
    """Python would end itself by SIGINT: the torture study saw it once in 30 signals."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_A_STRING)
    done = command(cwd=tmp_path, program=("-m", "interrupted"), LANG="C")
    assert (done.returncode, done.stderr) == (143, "stopped by SIGTERM\n")


def test_an_error_of_our_own_is_no_finding_and_says_where_to_report_it(called, monkeypatch):
    monkeypatch.setattr("attnbench.commands.history.metric_series", lambda *_, **__: {}["nothing"])
    found = called("history")
    assert found.returncode == ExitCode.internal == 70
    assert "Traceback" in found.stderr
    last = found.stderr.splitlines()[-1]
    assert last.startswith("internal error: KeyError: 'nothing'; ")
    assert f"report it at {cli.TRACKER}" in last


@pytest.mark.parametrize("arguments", [("list", "axes"), ("list", "axes", "--json"), ("--help",), ("history",)])
def test_a_closed_pipe_ends_a_command_quietly_as_it_ends_others(tmp_path, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "harness")}
    journals.write(tmp_path / "results" / "runs" / "one", journals.USUAL[:1], ("sdpa", "fused"))
    command = [forks.python(), "-m", "attnbench", *arguments]
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("words", RETIRED)
def test_a_retired_command_names_its_replacement(called, words):
    found = called(*words.split(), "x")
    assert found.returncode == 2
    assert RETIRED[words] in found.stderr
    assert found.stderr.count("\n") == 1
