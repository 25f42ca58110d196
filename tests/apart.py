"""Run tests marked `cuda` in another process: a test that loses the device's context fails alone.

All run in one process. A test that fails there, or has no report, runs again in a process of its own, whose reports
count. These are hooks of pytest, for a conftest.py. The child writes JSON lines to a file, one for each phase of a
test; a test without a report has died, and fails with its last output. Without a device no child is started: such tests
are skipped in this process.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

MARK = "cuda"
FILE = "ATTNBENCH_TEST_REPORTS"
"""The variable that names a child's file; if it is set, this process is a child."""
PAIRS = ("location", "longrepr")
"""Fields that are tuples in a report but lists in JSON: the location, and the reason of a skipped test."""
LIMIT_S = 600.0
"""Seconds of a child without a report before it is killed."""
SHOWN = 4000
"""Characters of a lost child's output to show."""
Reports = dict[str, list[pytest.TestReport]]
"""The reports of tests, by node id."""
TOGETHER = pytest.StashKey[Reports]()
"""The reports of the process that runs all marked tests."""


def has_device() -> bool:
    """Whether there is a CUDA device to lose."""
    import torch

    return torch.cuda.is_available()


def is_apart(item: pytest.Item) -> bool:
    """Whether a test runs in another process."""
    return item.get_closest_marker(MARK) is not None and FILE not in os.environ and has_device()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a marked test in another process, and forward its reports."""
    if not is_apart(item):
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


def reports_of(item: pytest.Item) -> list[pytest.TestReport]:
    """Return a test's reports from the process that runs all marked tests; if it fails there, from one of its own."""
    if TOGETHER not in item.config.stash:
        item.config.stash[TOGETHER] = run_together([each for each in item.session.items if is_apart(each)])
    reports = item.config.stash[TOGETHER].get(item.nodeid, [])
    if not reports or any(report.failed for report in reports):
        ending, found = run_child([item])
        keywords = dict.fromkeys(item.keywords, 1)
        place: dict[str, Any] = {"nodeid": item.nodeid, "location": item.location, "keywords": keywords}
        lost = pytest.TestReport(**place, outcome="failed", longrepr=ending, when="call")
        reports = found.get(item.nodeid, [lost])
    return reports


def run_together(items: list[pytest.Item]) -> Reports:
    """Run tests in one process, and in the next one those after a test with which it died or hung."""
    reports: Reports = {}
    rest = list(items)
    while rest:
        _, found = run_child(rest)
        reports |= found
        ended = list(itertools.takewhile(lambda item, found=found: item.nodeid in found, rest))
        rest = rest[len(ended) + 1 :]
    return reports


def run_child(items: list[pytest.Item]) -> tuple[str, Reports]:
    """Run tests in a process; return its ending with its last output, and the reports by test that came to its end."""
    config = items[0].config
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "reports.jsonl", Path(folder) / "log"
        shown = "--capture=tee-sys"  # keeps the output even if the process dies
        names = [item.nodeid for item in items]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", shown, "-m", MARK, *names]
        file.touch()
        with log.open("wb") as out:
            child = subprocess.Popen(
                command, cwd=config.rootpath, env=os.environ | {FILE: str(file)}, stdout=out, stderr=out
            )
            ending = _ending(child, file)
        printed = log.read_bytes().decode(errors="replace")[-SHOWN:]
        reports: Reports = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            data |= {name: tuple(value) for name, value in data.items() if name in PAIRS and isinstance(value, list)}
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            reports.setdefault(report.nodeid, []).append(report)
    ended = {name: phases for name, phases in reports.items() if phases[-1].when == "teardown"}
    return f"its process {ending}, and it has no report:\n{printed}", ended


def _ending(child: "subprocess.Popen[bytes]", file: Path) -> str:
    """Wait for a child that goes on reporting; kill it after LIMIT_S without a report."""
    while True:
        before = file.stat().st_size
        with suppress(subprocess.TimeoutExpired):
            return f"ended with exit code {child.wait(LIMIT_S)}"
        if file.stat().st_size == before:
            child.kill()
            child.wait()
            return f"was killed after {LIMIT_S:g} s"
