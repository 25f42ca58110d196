"""Old faults of code for GPUs, brought back one by one in a copy of the project: its test must fail on each.

python -m pytest tests/old_faults.py                        # all
python -m pytest tests/old_faults.py -k "queued or xformers" # some
python -m tests.old_faults                                  # write the table of results/gallery/gpu/faults.md

tests/old_faults.toml defines each fault as a change of today's source. A test must pass in the unchanged copy. With the
fault it must fail by an assertion, or by the error that the fault raises.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.recipes import copy_project

ROOT = Path(__file__).parent.parent
FAULTS = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "results" / "gallery" / "gpu" / "faults.md"
BLOCK = re.compile(r"(?<=<!-- begin faults -->\n).*?(?=<!-- end faults -->)", re.DOTALL)
LIMIT_S = 300.0
ASSERTION = ("assert ", "AssertionError", "Failed: DID NOT RAISE")
"""Beginnings of pytest's summary for a failed assertion."""


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lines of a file as they are now, which occur once, and as they were with the fault."""

    file: str
    now: str
    was: str


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault, and the test that must fail on it."""

    test: str  # FILE::NAME
    planted: str  # the fault in words
    change: tuple[Change, ...]
    commit: str  # the last commit with the fault
    error: str = ""  # beginning of the test's error message, unless it is a failed assertion
    kept: str = ""  # parts of the old code that cannot be brought back, and why
    gpu: str = ""  # effects that only a GPU shows

    @property
    def row(self) -> str:
        planted = f"{self.planted}. {self.kept}" if self.kept else self.planted
        by = self.error.partition(":")[0] or "assertion"
        return f"| {planted} | {self.commit} | `{self.test}` | {by} | {self.gpu or '-'} |\n"


def faults() -> tuple[Fault, ...]:
    """Load all faults, in the order of the page."""
    read = tomllib.loads(FAULTS.read_text(encoding="utf-8"))
    return msgspec.convert(read["fault"], tuple[Fault, ...])


def table() -> str:
    head = "| the fault | last commit with it | its test | fails by | only a GPU shows |"
    return f"{head}\n{'| --- ' * 5}|\n" + "".join(fault.row for fault in faults())


def changed(fault: Fault, folder: Path) -> dict[Path, str]:
    """Return the faulty text of each file that the fault changes.

    Raises:
        ValueError: a text does not occur exactly once, or the result is not valid Python (or TOML).
    """
    texts: dict[Path, str] = {}
    for change in fault.change:
        path = folder / change.file
        text = texts.get(path) or path.read_text(encoding="utf-8")
        # Without the last line break, so that a partial last line matches.
        now, was = (each.rstrip("\n") if change.was else each for each in (change.now, change.was))
        if (number := text.count(now)) != 1:
            raise ValueError(
                f"{change.file} has this {number} times, not once: say in {FAULTS.name} what it is now\n{now}"
            )
        texts[path] = text.replace(now, was)
    for path, text in texts.items():
        try:
            _ = ast.parse(text) if path.suffix == ".py" else tomllib.loads(text)
        except (SyntaxError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path.name} is no Python with the fault of {fault.test}: {error}") from None
    return texts


@contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """Put the fault into the files of that folder within the context, then restore them."""
    before = {path: (path.read_bytes(), path.stat()) for path in (folder / each.file for each in fault.change)}
    for path, text in changed(fault, folder).items():
        path.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        for path, (content, stat) in before.items():
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # Python compares compiled files with these times


def run_test(test: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a test in that folder; the output has pytest's summary line for each case that does not pass."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder / "harness"), str(folder)]), "COLUMNS": "400"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not browser", test]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


def objection(fault: Fault, output: str) -> str:
    """Explain why the output of a test does not show that the test finds the fault; "" if it does show it."""
    if re.search("^ERROR ", output, re.MULTILINE):
        return f"the test did not run: {output}"
    failed = re.findall(r"^FAILED [^\[\s]+(?:\[.*?\])? - (.*)", output, re.MULTILINE)
    others = [words for words in failed if not words.startswith((fault.error,) if fault.error else ASSERTION)]
    if others:
        return f"the test fails, but not by {fault.error or 'an assertion'}: {others[0]}"
    return "" if failed else f"the test passes with the fault: {output}"


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "copy"
    copy_project(folder)
    return folder


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.test)
def test_a_test_passes_and_fails_with_the_fault(fault: Fault, copy: Path) -> None:
    before = run_test(fault.test, copy)
    assert before.returncode == 0, before.stdout
    with planted(fault, copy):
        assert objection(fault, run_test(fault.test, copy).stdout) == ""


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: table(), page), encoding="utf-8")
