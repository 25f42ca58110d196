"""The example workflow and its action: both end with the gate's exit code, and write the summary."""

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOW, ACTION = ROOT / "examples" / "ci" / "attnbench.yml", ROOT / "action.yml"
STUB = """#!/bin/sh
case $1 in
    compare)
        mkdir -p {session}
        echo "$@" > {session}/{left}
        exit {compared} ;;
    gate)
        mkdir -p gate
        echo "$@" > gate/gate.md
        exit {judged} ;;
esac
"""
SESSION = "results/runs/20260101T000000Z-compare-00"
EARLIER = "results/runs/20250101T000000Z-compare-ff"
ELSEWHERE = "elsewhere"  # as if the command ended before there is a session
COMPARED = "compare rev:HEAD^1 rev:HEAD --implementation my file.py:Name\n"
JUDGED = f"gate --to gate {SESSION}\n"


@pytest.fixture(params=[WORKFLOW, ACTION], ids=lambda path: path.name, autouse=True)
def _document(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCUMENT", str(request.param))
    if request.param == ACTION:  # as its inputs set it
        defaults = dict(re.findall(r"^  (base|candidate):\n.*\n    default: (.*)$", ACTION.read_text(), re.MULTILINE))
        monkeypatch.setenv("BASE", defaults["base"])
        monkeypatch.setenv("CANDIDATE", defaults["candidate"])
        monkeypatch.setenv("OPTIONS", "")


def script() -> str:
    """Return the script of the step that compares."""
    found = re.search(r"^ {6,8}run: \|\n((?: {8,10}.*\n)+?)(?= {4}- |\Z| {6}- )", document().read_text(), re.MULTILINE)
    assert found is not None
    return textwrap.dedent(found[1])


def document() -> Path:
    """Return the tested document."""
    return Path(os.environ["DOCUMENT"])


def follow(folder: Path, **ends: int | str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the step in `folder`, with commands of these exit codes; return the summary."""
    stub = folder / "bin" / "attnbench"
    stub.parent.mkdir()
    stub.write_text(STUB.format(**{"left": "summary.md"} | ends))
    stub.chmod(0o755)
    (folder / "summary").touch()
    given = {"IMPLEMENTATION": "my file.py:Name", "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    environment = os.environ | given | {"PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-e", "-o", "pipefail", "-c", script()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done, (folder / "summary").read_text()


@pytest.mark.parametrize(
    ("compared", "judged", "ends"),
    [(0, 0, 0), (0, 1, 1), (1, 1, 1), (3, 1, 1), (4, 1, 1), (1, 0, 0), (0, 2, 2), (3, 3, 0), (4, 4, 0), (0, 130, 130)],
)
def test_the_step_ends_as_the_gate_does_and_only_warns_where_nothing_could_be_said(tmp_path, compared, judged, ends):
    done, summary = follow(tmp_path, compared=compared, judged=judged, session=SESSION)
    assert done.returncode == ends
    assert summary == COMPARED + JUDGED
    warning = {3: "inconclusive", 4: "the runner was disturbed"}.get(judged, "")
    assert done.stdout.count("::warning::") == bool(warning)
    assert warning in done.stdout


@pytest.mark.parametrize("compared", [2, 130])
def test_a_comparison_that_did_not_come_to_its_end_fails_unjudged(tmp_path, compared):
    done, summary = follow(tmp_path, compared=compared, judged=0, session=SESSION)
    assert done.returncode == compared
    assert summary == COMPARED


@pytest.mark.parametrize("code", [0, 1, 2])
def test_without_a_session_there_is_nothing_to_judge(tmp_path, code):
    done, summary = follow(tmp_path, compared=code, judged=1, session=ELSEWHERE)
    assert done.returncode == code
    assert summary == ""
    assert not (tmp_path / "gate").exists()


@pytest.mark.parametrize("code", [1, 3, 4])
def test_a_comparison_that_broke_off_before_it_reported_its_end_fails_unjudged(tmp_path, code):
    done, summary = follow(tmp_path, compared=code, judged=4, session=SESSION, left="journal.jsonl")
    assert done.returncode == code
    assert summary == ""
    assert "::warning::" not in done.stdout
    assert not (tmp_path / "gate").exists()


@pytest.mark.parametrize(("session", "ends", "reported"), [(ELSEWHERE, 1, ""), (SESSION, 0, COMPARED + JUDGED)])
def test_the_session_of_an_earlier_job_is_neither_judged_nor_reported(tmp_path, session, ends, reported):
    (tmp_path / EARLIER).mkdir(parents=True)
    (tmp_path / EARLIER / "summary.md").write_text("earlier\n")
    done, summary = follow(tmp_path, compared=1, judged=0, session=session)
    assert done.returncode == ends
    assert summary == reported


def test_the_action_passes_its_options_on(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCUMENT", str(ACTION))
    monkeypatch.setenv("BASE", "rev:a b")
    monkeypatch.setenv("CANDIDATE", "rev:HEAD")
    monkeypatch.setenv("OPTIONS", "--budget 30 --set seq_len=64")
    done, summary = follow(tmp_path, compared=0, judged=0, session=SESSION)
    assert done.returncode == 0
    assert summary.startswith("compare rev:a b rev:HEAD --implementation my file.py:Name --budget 30 --set seq_len=64")


def test_what_the_gate_writes_is_kept():
    text = document().read_text()
    (folder,) = re.findall(r"gate --to (\S+)", text)
    assert folder in text.split("actions/upload-artifact")[1].split()
