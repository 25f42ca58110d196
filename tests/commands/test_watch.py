"""`attnbench check --watch`, as somebody uses it who edits a file."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnbench import plugins
from attnbench.checking import reference
from attnbench.cli import app
from attnbench.commands import watch
from attnbench.processes.worker_client import Template
from attnbench.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("forked_workers")

RIGHT = """from softly import softly


def mine(query, key, value, *, mask=None):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softly(scores) @ value
"""
SOFTLY = "def softly(scores):\n    return scores.softmax(dim=-1)\n"
SIZES = ("--set=seq_len=17", "--set=num_heads=2", "--set=head_dim=8", "--set=mask=causal", "--set=num_threads=1")
PATIENCE_S = 60
SEEN: dict[Path, int] = {}  # by file, the end of the words that were found last


def said(output: Path, words: str) -> None:
    """Wait until the output holds the words; the next call looks only at what follows them."""
    until_s = time.monotonic() + PATIENCE_S
    while not (found := re.compile(words).search(output.read_text(), SEEN.get(output, 0))):
        assert time.monotonic() < until_s, output.read_text()
        time.sleep(0.05)
    SEEN[output] = found.end()


@pytest.mark.usefixtures("interruptible")
def test_each_save_is_judged_anew_until_ctrl_c(tmp_path: Path) -> None:
    mine, softly, output = tmp_path / "mine.py", tmp_path / "softly.py", tmp_path / "output.txt"
    mine.write_text(RIGHT)
    softly.write_text(SOFTLY)
    command = [sys.executable, "-m", "attnbench", "check", "mine.py:mine", "--watch", *SIZES]
    with output.open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
    try:
        said(output, "pass: right")
        said(output, "watching mine.py, softly.py")
        softly.write_text(SOFTLY.replace("dim=-1", "dim=-2"))  # a module that the file imports
        said(output, "softly.py was saved")
        said(output, "fail: WRONG")
        said(output, "watching")
        mine.write_text(RIGHT.replace("if mask is not None:", "if mask is not None"))
        said(output, "error: .*mine.py")
        softly.write_text(SOFTLY)
        mine.write_text(RIGHT)
        said(output, "pass: right")
        said(output, "watching")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in output.read_text()


def test_a_save_during_a_check_counts_and_what_is_missing_for_a_moment_is_awaited(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("one = 1\n")
    seen = watch.stamps([file])
    file.unlink()
    assert watch.stamps([file]) == {}
    file.write_text("one = 2\n")
    os.utime(file, ns=(1, 1))
    assert watch.wait_for_save([file], seen) == file


def test_files_are_those_that_are_named_and_those_beside_them_that_they_import(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "mine.py").write_text("import torch\nfrom kernels import one\nimport helper\n")
    (tmp_path / "helper.py").write_text("import mine\nimport deeper\n")
    for name in ("deeper.py", "unused.py", "kernels/one.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "kernels" / "__init__.py").write_text("from . import one\n")
    assert plugins.sources([f"other={tmp_path}/mine.py+compile"]) == plugins.sources([f"{tmp_path}/mine.py"])
    names = {path.relative_to(tmp_path).as_posix() for path in plugins.sources(["sdpa", f"{tmp_path}/mine.py:attend"])}
    assert names == {"mine.py", "helper.py", "deeper.py", "kernels/__init__.py", "kernels/one.py"}


def test_processes_start_again_after_a_check_that_was_abandoned(tmp_path: Path) -> None:
    """A file that was saved between the plan and the second lane's start once ended all later checks."""
    template = Template(tmp_path / "log")
    template.is_over.set()
    template.forget_code()
    assert not template.is_over.is_set()


@pytest.mark.parametrize(
    ("options", "says"),
    [(["sdpa"], "needs an implementation in a file"), (["sdpa", "--json"], "none of --json"), ([], "needs")],
)
def test_what_cannot_be_watched_is_refused(options: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["check", "--watch", *options])
    assert isinstance(done.exception, ValueError)
    assert says in str(done.exception)


def test_kept_references_are_the_same_objects_and_probes_that_show_nothing_stay_left_out(monkeypatch) -> None:
    monkeypatch.setattr(reference, "KEPT", None)
    workload = Workload(seq_len=5, num_heads=1, head_dim=4)
    assert reference.reference_for_probe(workload, "normal", 3) is not reference.reference_for_probe(
        workload, "normal", 3
    )
    reference.keep_references()
    once = reference.reference_for_probe(workload, "normal", 3)
    assert reference.reference_for_probe(workload, "normal", 3) is once
    assert reference.reference_for_probe(workload, "normal", 4) is not once
