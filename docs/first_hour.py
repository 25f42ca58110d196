"""Renew the answers in docs/guide.md: run the command of each question, and write down its output and duration.

Command: `python docs/first_hour.py [NUMBER ...]`; all five take about three minutes on two cores. With `readme` as
argument, the outputs in README.md are renewed instead. Only text between `<!-- begin N -->` and `<!-- end N -->` is
generated; the rest is written by hand.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from attnbench.processes.worker_client import module_path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guide.md"
EXAMPLES = ROOT / "examples" / "first_hour"
MINE = "mine.py"
WIDTH = 80
FIRST, LAST = 13, 12
"""Lines shown from the beginning and the end of a long output, so that a closing screen is shown whole."""


@dataclass(frozen=True)
class Question:
    """A user's question and the command that answers it."""

    text: str
    command: str
    exit_codes: tuple[int, ...] = (0,)
    is_sweep: bool = False  # whether it needs a sweep, which may take longer than a minute


QUESTIONS = (
    Question(
        "From which length is SDPA faster than the textbook form?",
        "attnbench run fused --set seq_len=16,32,64,128,256,512 --set mask=causal --budget 50",
    ),
    Question(
        "How long a context fits in 8 GiB?",
        "attnbench growth fused sdpa --memory-limit 8GiB --set mask=causal",
        is_sweep=True,  # of lengths, with two calls around the limit
    ),
    Question(
        "Did my change slow it down?",
        "attnbench compare before.py:attention after.py:attention --set seq_len=512 --set mask=causal --budget 45",
        exit_codes=(0, 1, 3),
    ),
    Question(
        "Is my ALiBi with grouped heads right?",
        "attnbench check alibi.py:mine --set num_heads=4 --set num_kv_heads=2 --set mask=causal+alibi",
        exit_codes=(1,),
    ),
    Question(
        "Where does the time go?",
        "attnbench profile fused --set seq_len=512 --set mask=causal",
    ),
)


README = ROOT / "README.md"
SHOWN = {
    "run": Question(
        "Which is faster?", "attnbench run fused sdpa_math --set seq_len=128,512 --set mask=causal --budget 40"
    ),
    "check": Question("Is it right?", "attnbench check mine.py:mistaken", exit_codes=(1,)),
}
"""Commands shown in the README, by the names of its blocks."""


def answered(question: Question, folder: Path, *, is_short: bool = True) -> str:
    """Run the command, and format it and its output as Markdown.

    If `is_short` is true, a long output is shortened, and the duration and a nonzero exit code are added.

    Raises:
        RuntimeError: the command ends with an exit code that is not expected.
    """
    start = time.monotonic()
    done = _shell(question.command, folder)
    took_s = time.monotonic() - start
    if done.returncode not in question.exit_codes:
        raise RuntimeError(f"{question.command} exits {done.returncode}:\n{done.stdout}\n{done.stderr}")
    lines = re.sub(r"\x1b\[[\d;]*m", "", done.stdout).strip().splitlines()
    if is_short and len(lines) > FIRST + LAST + 1:
        lines = [*lines[:FIRST], "...", *lines[-LAST:]]
    shown = "\n".join(lines).replace(str(folder), ".")
    exits = f", exit code {done.returncode}" if done.returncode else ""
    block = f"```console\n$ {question.command}\n{shown}\n```"
    return f"{block}\n\nIt took {took_s:.0f} s{exits}." if is_short else block


def _shell(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in bash, as in a terminal of WIDTH columns."""
    shown = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1"}
    environment = os.environ | shown | {"PYTHONPATH": module_path(ROOT / "harness")}
    program = f'attnbench() {{ {shlex.quote(sys.executable)} -m attnbench "$@"; }}; {command}'
    return subprocess.run(
        ["/bin/bash", "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def page(earlier: str, made: Mapping[int | str, str]) -> str:
    """Replace the text between the marks of each name in `made` by its new text; `earlier` is the whole page."""
    text = earlier
    for name, answer in made.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{answer}\n\n{end}{after}"
    return text


def machine() -> str:
    """Describe the machine: processor, cores, versions and day."""
    from attnbench.devices import environment

    found = environment.collect()
    return (
        f"Made on {datetime.now(UTC):%Y-%m-%d} by `python docs/first_hour.py`: {found.cpu}, {found.num_physical_cores} "
        f"cores, torch {found.versions['torch']}."
    )


def show_in_readme() -> None:
    """Renew the outputs in the README."""
    with tempfile.TemporaryDirectory(prefix="attnbench-shown-") as name:
        (Path(name) / MINE).write_text((EXAMPLES / MINE).read_text(encoding="utf-8"), encoding="utf-8")
        found = {block: answered(question, Path(name), is_short=False) for block, question in SHOWN.items()}
    README.write_text(page(README.read_text(encoding="utf-8"), found), encoding="utf-8")


def main(numbers: list[int]) -> None:
    """Answer the questions with these numbers, and write the page after each.

    Without numbers, answer all questions, and then describe the machine.
    """
    with tempfile.TemporaryDirectory(prefix="attnbench-first-hour-") as name:
        folder = Path(name)
        for file in EXAMPLES.glob("*.py"):
            (folder / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
        for number in numbers or range(1, len(QUESTIONS) + 1):
            question = QUESTIONS[number - 1]
            print(f"{number}: {question.text}", file=sys.stderr, flush=True)
            made: dict[int | str, str] = {number: answered(question, folder)}
            PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    if not numbers:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), {0: machine()}), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["readme"]:
        show_in_readme()
    else:
        main([int(each) for each in sys.argv[1:]])
