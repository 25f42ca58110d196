"""Old faults of docs/cuda.md, brought back one by one in a copy of the project: its test must fail on each.

python -m tests.old_faults                 # all, and the page's table is written
python -m tests.old_faults queued xformers # those whose test has one of these words; the page is not written

tests/old_faults.toml defines each fault as a change of today's source. A test must pass in the unchanged copy, and fail
with the fault by an assertion, or by the error that the fault raises. Exit code 1 if one does not.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import typer

from tests.recipes import copy_project

ROOT = Path(__file__).parent.parent
FAULTS = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "cuda.md"
BLOCK = re.compile(r"(<!-- begin faults -->\n).*?(<!-- end faults -->)", re.DOTALL)
LIMIT_S = 300.0
ASSERTION = ("assert ", "AssertionError", "Failed: DID NOT RAISE")
"""Beginnings of pytest's summary for a failed assertion."""
SHOWN = 2000


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lines of a file, which occur once, and their faulty version."""

    file: str
    now: str
    was: str


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault, and the test that must fail on it."""

    test: str  # FILE::NAME
    planted: str  # in words
    change: tuple[Change, ...]
    commit: str  # the last commit with the fault
    error: str = ""  # beginning of the test's error, if it is no assertion
    kept: str = ""  # parts of the old code that cannot be brought back, and why
    gpu: str = ""  # effects that only a GPU shows


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of a test with its fault: the number of failed cases, and an error or ""."""

    num_failed: int
    num_cases: int
    said: str  # the first failure
    wrong: str = ""


def faults() -> tuple[Fault, ...]:
    """Load all faults, in the order of the page."""
    read = tomllib.loads(FAULTS.read_text(encoding="utf-8"))
    return msgspec.convert(read["fault"], tuple[Fault, ...])


def changed(fault: Fault, folder: Path) -> dict[Path, str]:
    """Return the faulty text of each file that the fault changes.

    Raises:
        ValueError: a text is not there exactly once, or the result is no Python.
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
    """Put the fault into the files of that folder, within the context."""
    before = {path: (path.read_bytes(), path.stat()) for path in (folder / each.file for each in fault.change)}
    for path, text in changed(fault, folder).items():
        path.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        for path, (content, stat) in before.items():
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # Python checks compiled files by it


def run_tests(tests: Sequence[str], folder: Path) -> str:
    """Run the tests in that folder, and return pytest's summary, a line for each case."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder / "harness"), str(folder)]), "COLUMNS": "400"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rA", "-p", "no:cacheprovider", "-m", "not browser"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"ERROR {tests[0]} - it was not done after {LIMIT_S:g} s"
    return done.stdout.rpartition("short test summary info")[2] or f"ERROR {tests[0]} - {done.stdout[-SHOWN:]}"


def cases(summary: str, test: str) -> list[tuple[str, str]]:
    """Return the status and message of each case of a test."""
    case = re.compile(rf"(PASSED|FAILED|ERROR|SKIPPED) {re.escape(test)}(?:\[.*?\])?(?: - (.*))?")
    found = (case.fullmatch(line) for line in summary.splitlines())
    return [(each[1], each[2] or "") for each in found if each]


def judged(fault: Fault, summary: str) -> Outcome:
    """Judge the outcome of a fault's test by the summary."""
    ended = cases(summary, fault.test)
    failed = [words for kind, words in ended if kind == "FAILED"]
    outcome = Outcome(num_failed=len(failed), num_cases=len(ended), said=failed[0] if failed else "")
    wrong = ""
    if not ended or any(kind == "ERROR" for kind, _ in ended):
        wrong = f"the test did not run: {summary.strip()[-SHOWN:]}"
    elif not failed:
        wrong = "the test passes with the fault"
    elif others := [words for words in failed if not words.startswith((fault.error,) if fault.error else ASSERTION)]:
        wrong = f"the test fails, but not by {fault.error or 'an assertion'}: {others[0]}"
    return msgspec.structs.replace(outcome, wrong=wrong)


def table(outcomes: dict[str, Outcome]) -> str:
    """Build the page's table from the faults that have an outcome."""
    lines = []
    for fault in faults():
        if (outcome := outcomes.get(fault.test)) is None:
            continue
        cases_of = f" ({outcome.num_failed}/{outcome.num_cases})" if outcome.num_cases > 1 else ""
        by = (fault.error.partition(":")[0] or "assertion") + cases_of
        ending = f"**not as it should: {outcome.wrong.splitlines()[0]}**" if outcome.wrong else by
        kept = f". {fault.kept}" if fault.kept else ""
        columns = [f"{fault.planted}{kept}", fault.commit, f"`{fault.test}`", ending, fault.gpu or "-"]
        lines.append(f"| {' | '.join(columns)} |")
    head = "| the fault | last commit with it | its test | fails by (cases) | only a GPU shows |\n"
    head += "| --- | --- | --- | --- | --- |\n"
    return head + "".join(f"{line}\n" for line in lines)


def main(words: Sequence[str]) -> int:
    """Bring the faults back; return 0 if each is detected as expected."""
    asked = [each for each in faults() if not words or any(word in each.test for word in words)]
    if not asked:
        typer.echo(f"no test has any of {', '.join(words)}: see {FAULTS.name}", err=True)
        return 2
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "copy"
        copy_project(folder)
        summary = run_tests([each.test for each in asked], folder)
        for fault in asked:
            start, ended = time.monotonic(), cases(summary, fault.test)
            if not ended or any(kind not in {"PASSED", "SKIPPED"} for kind, _ in ended):
                found = f"{summary[-SHOWN:]}" if not ended else str(ended)
                outcome = Outcome(0, len(ended), "", wrong=f"without the fault it does not pass: {found}")
            else:
                with planted(fault, folder):
                    outcome = judged(fault, run_tests([fault.test], folder))
            outcomes[fault.test] = outcome
            took_s = time.monotonic() - start
            how = "WRONG" if outcome.wrong else "fails"
            typer.echo(f"{how} ({took_s:.0f} s) {fault.test}: {outcome.wrong or outcome.said}")
    written = table(outcomes)
    typer.echo(written)
    if not words:
        PAGE.write_text(
            BLOCK.sub(lambda block: block[1] + written + block[2], PAGE.read_text("utf-8")), encoding="utf-8"
        )
    return int(any(each.wrong for each in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
