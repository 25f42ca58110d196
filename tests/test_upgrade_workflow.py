"""The workflow that compares two environments: its exit code, and the summary from the one JSON."""

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
WORKFLOW = ROOT / "examples" / "ci" / "upgrade.yml"


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (2, 2), (3, 0), (4, 4)])
def test_the_summary_has_the_sentence_what_changed_and_the_warnings(tmp_path, code, ends):
    results = journals.write(tmp_path / "run", journals.workloads(seq_len=(128,)), ("sdpa", "fused"))
    end = Conclusion(ending=Ending.passed, words="equal")
    warning = verdict.Warning(name="contention", text="High CPU contention")
    found = msgspec.structs.replace(
        verdict.report(results, end, code, ["compare"]), changed=("sdpa: status ok",), warnings=(warning,)
    )
    (tmp_path / "found.json").write_text(verdict.encoded(found))
    stub = tmp_path / "attnbench"
    stub.write_text(f'#!/bin/sh\necho "$@" > words\ncat found.json\nexit {code}\n')
    stub.chmod(0o755)
    text = WORKFLOW.read_text(encoding="utf-8").split("name: Compare both environments")[1]
    script = textwrap.dedent(re.search(r"run: \|\n(.*?)\n      - uses", text, re.DOTALL)[1])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "IMPLEMENTATION": "my file.py:f"}
    environment["GITHUB_STEP_SUMMARY"] = str(tmp_path / "summary.md")
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == ends
    assert (tmp_path / "words").read_text() == "compare env:now env:next -i my file.py:f --json\n"
    if code != 2:
        assert (tmp_path / "summary.md").read_text().splitlines() == [
            "pass: equal.", "", "- sdpa: status ok", "- High CPU contention"
        ]  # fmt: skip
