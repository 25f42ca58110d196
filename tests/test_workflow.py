"""The example workflows and the action: they end with the gate's exit code, and write the summary."""

import os
import re
import subprocess
import textwrap
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.conclusion import Conclusion, Ending
from attnbench.reports import verdict
from tests import journals

ROOT = Path(__file__).parent.parent
WORKFLOW, ACTION = ROOT / "examples" / "ci" / "attnbench.yml", ROOT / "action.yml"
UPGRADE = ROOT / "examples" / "ci" / "upgrade.yml"
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


@pytest.fixture(params=[WORKFLOW, ACTION], ids=lambda path: path.name)
def document(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == ACTION:  # as its inputs set it
        defaults = dict(re.findall(r"^  (base|candidate):\n.*\n    default: (.*)$", ACTION.read_text(), re.MULTILINE))
        monkeypatch.setenv("BASE", defaults["base"])
        monkeypatch.setenv("CANDIDATE", defaults["candidate"])
        monkeypatch.setenv("OPTIONS", "")
    return request.param


def follow(document: Path, folder: Path, stub: str = STUB, **ends: int | str) -> tuple[int, str, str]:
    """Run the step that compares, with commands of these exit codes; return its exit code, output and summary."""
    found = re.search(r"^ {6,8}run: \|\n((?: {8,10}.*\n)+?)(?= {4}- |\Z| {6}- )", document.read_text(), re.MULTILINE)
    command = folder / "bin" / "attnbench"
    command.parent.mkdir()
    command.write_text(stub.format(**{"left": "summary.md"} | ends))
    command.chmod(0o755)
    (folder / "summary").touch()
    given = {"IMPLEMENTATION": "my file.py:Name", "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    environment = os.environ | given | {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    script = ["bash", "-e", "-o", "pipefail", "-c", textwrap.dedent(found[1])]
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, (folder / "summary").read_text()


JUDGED_ENDS = ((0, 0, 0), (0, 1, 1), (1, 1, 1), (4, 1, 1), (1, 0, 0), (0, 2, 2), (3, 3, 0), (4, 4, 0), (0, 130, 130))
CASES = [
    *((compared, judged, SESSION, "summary.md", ends, COMPARED + JUDGED) for compared, judged, ends in JUDGED_ENDS),
    (2, 0, SESSION, "summary.md", 2, COMPARED),  # it did not come to its end, and is not judged
    (130, 0, SESSION, "summary.md", 130, COMPARED),
    (0, 1, ELSEWHERE, "summary.md", 0, ""),  # without a session there is nothing to judge
    (2, 1, ELSEWHERE, "summary.md", 2, ""),
    (1, 4, SESSION, "journal.jsonl", 1, ""),  # it broke off before it reported its end
    (4, 4, SESSION, "journal.jsonl", 4, ""),
]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("compared", "judged", "session", "left", "ends", "reported"), CASES)
def test_the_step_ends_as_the_gate_does_and_only_warns_where_nothing_could_be_said(
    document, tmp_path, compared, judged, session, left, ends, reported, *, is_first
):
    if not is_first:  # the session of an earlier job is neither judged nor reported
        (tmp_path / EARLIER).mkdir(parents=True)
        (tmp_path / EARLIER / "summary.md").write_text("earlier\n")
    code, said, summary = follow(document, tmp_path, compared=compared, judged=judged, session=session, left=left)
    assert (code, summary) == (ends, reported)
    is_judged = JUDGED in reported
    assert (tmp_path / "gate").exists() == is_judged
    warning = {3: "inconclusive", 4: "the runner was disturbed"}.get(judged, "") if is_judged else ""
    assert said.count("::warning::") == bool(warning)
    assert warning in said


def test_the_action_passes_its_options_on(tmp_path, monkeypatch):
    monkeypatch.setenv("BASE", "rev:a b")
    monkeypatch.setenv("CANDIDATE", "rev:HEAD")
    monkeypatch.setenv("OPTIONS", "--budget 30 --set seq_len=64")
    code, _, summary = follow(ACTION, tmp_path, compared=0, judged=0, session=SESSION)
    assert code == 0
    assert summary.startswith("compare rev:a b rev:HEAD --implementation my file.py:Name --budget 30 --set seq_len=64")


def test_what_the_gate_writes_is_kept(document):
    text = document.read_text()
    (folder,) = re.findall(r"gate --to (\S+)", text)
    assert folder in text.split("actions/upload-artifact")[1].split()


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (2, 2), (3, 0), (4, 4)])
def test_the_summary_of_an_upgrade_has_the_sentence_what_changed_and_the_warnings(tmp_path, code, ends):
    results = journals.write(tmp_path / "run", journals.workloads(seq_len=(128,)), ("sdpa", "fused"))
    end = Conclusion(ending=Ending.passed, words="equal")
    warning = verdict.Warning(name="contention", text="High CPU contention")
    found = msgspec.structs.replace(
        verdict.report(results, end, code, ["compare"]), changed=("sdpa: status ok",), warnings=(warning,)
    )
    (tmp_path / "found.json").write_bytes(msgspec.json.encode(found))
    stub = '#!/bin/sh\necho "$@" > words\ncat found.json\nexit {compared}\n'
    ended, _, summary = follow(UPGRADE, tmp_path, stub, compared=code)
    assert ended == ends
    assert (tmp_path / "words").read_text() == "compare env:now env:next -i my file.py:Name --json\n"
    if code != 2:
        assert summary.splitlines() == ["pass: equal.", "", "- sdpa: status ok", "- High CPU contention"]
