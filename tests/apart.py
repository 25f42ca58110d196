"""Tests marked `cuda` in a process of their own each: one that loses the device's context costs the others nothing.

These are hooks of pytest, for a conftest.py. The child reports to a file of JSON lines, one for each phase of the test;
a test that leaves none has died, and fails with what it printed last. Without a device nothing is started: such tests
are skipped where they are.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "cuda"
FILE = "ATTNBENCH_TEST_REPORTS"
"""The variable that names a child's file; where it is set, this is a child."""
PAIRS = ("location", "longrepr")
"""What is a tuple in a report, and a list in JSON; the place and reason of a skipped test are."""
LIMIT_S = 600.0
SHOWN = 4000
"""Characters of what a lost child has printed."""


def has_device() -> bool:
    """Whether there is a CUDA device to lose."""
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a marked test in a process of its own, and report what it has reported."""
    if item.get_closest_marker(MARK) is None or FILE in os.environ or not has_device():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class Reporter:
    """A child's plug-in: it writes each report down."""

    def __init__(self, config: pytest.Config, file: Path) -> None:
        self.config, self.file = config, file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(data) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """In a child, write reports."""
    if FILE in os.environ:
        config.pluginmanager.register(Reporter(config, Path(os.environ[FILE])))


def reports_of(item: pytest.Item) -> Iterator[pytest.TestReport]:
    """What a test's own process reports of it; a failure where it dies or hangs before its call has ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reports.jsonl"
        shown = "--capture=tee-sys"  # what is printed is known even if the process dies
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", shown, "-m", MARK, item.nodeid]
        ending = ""
        try:
            done = subprocess.run(
                command,
                cwd=item.config.rootpath,
                env=os.environ | {FILE: str(file)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
            ending, printed = f"its process ended with exit code {done.returncode}", done.stdout
        except subprocess.TimeoutExpired as hung:
            ending, printed = f"its process was killed after {LIMIT_S:g} s", hung.stdout or b""
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    phases = set()
    for line in lines:
        data = json.loads(line)
        data |= {name: tuple(value) for name, value in data.items() if name in PAIRS and isinstance(value, list)}
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        phases.add(report.when)
        yield report
    if "teardown" not in phases:
        yield pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome="failed",
            longrepr=f"{ending}, and it has no report:\n{printed.decode(errors='replace')[-SHOWN:]}",
            when="call",
        )
