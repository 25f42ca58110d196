"""Run each test marked `cuda` in its own process: a test that loses the device's context fails alone.

These are hooks of pytest, for a conftest.py. The child writes JSON lines to a file, one for each phase of the test; a
test without a report has died, and fails with its last output. Without a device no child is started: such tests are
skipped in this process.
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
"""The variable that names a child's file; if it is set, this process is a child."""
PAIRS = ("location", "longrepr")
"""Fields that are tuples in a report but lists in JSON: the location, and the reason of a skipped test."""
LIMIT_S = 600.0
SHOWN = 4000
"""Characters of a lost child's output to show."""


def has_device() -> bool:
    """Whether there is a CUDA device to lose."""
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a marked test in its own process, and forward its reports."""
    if item.get_closest_marker(MARK) is None or FILE in os.environ or not has_device():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class Reporter:
    """The child's plug-in: it writes each report to the file."""

    def __init__(self, config: pytest.Config, file: Path) -> None:
        self.config, self.file = config, file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(data) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Write reports if this is a child."""
    if FILE in os.environ:
        config.pluginmanager.register(Reporter(config, Path(os.environ[FILE])))


def reports_of(item: pytest.Item) -> Iterator[pytest.TestReport]:
    """Return the reports of a test's process; a failure if it dies or hangs before its call has ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reports.jsonl"
        shown = "--capture=tee-sys"  # keeps the output even if the process dies
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
