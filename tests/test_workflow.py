"""The workflow that people copy: its script ends as the comparison does, and leaves the summary."""

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

WORKFLOW = Path(__file__).parent.parent / "examples" / "ci" / "attnbench.yml"
STUB = """#!/bin/sh
mkdir -p results/runs/20260101T000000Z-compare-00
printf '%s ' "$@" > results/runs/20260101T000000Z-compare-00/sides.md
exit {code}
"""


def script() -> str:
    """Of the step that compares."""
    found = re.search(r"^ {8}run: \|\n((?: {10}.*\n)+)", WORKFLOW.read_text(), re.MULTILINE)
    assert found is not None
    return textwrap.dedent(found[1])


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (2, 2), (3, 0), (4, 0), (130, 130)])
def test_the_step_fails_on_a_finding_and_only_warns_where_nothing_could_be_said(tmp_path, code, ends):
    stub = tmp_path / "bin" / "attnbench"
    stub.parent.mkdir()
    stub.write_text(STUB.format(code=code))
    stub.chmod(0o755)
    given = {"IMPLEMENTATION": "my file.py:Name", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    environment = os.environ | given | {"PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-e", "-o", "pipefail", "-c", script()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == ends
    assert (tmp_path / "summary").read_text() == "compare rev:HEAD^1 rev:HEAD --implementation my file.py:Name "
    assert ("::warning::" in done.stdout) is (code in {3, 4})
