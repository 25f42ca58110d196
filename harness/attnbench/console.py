"""Output while a command runs: lines of text without control characters, and progress."""

import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from rich.console import Console
from rich.live import Live
from rich.text import Text

from attnbench.processes.execution import Progress, Watch
from attnbench.units import sanitize_line

LINE_EVERY_S = 10.0  # least seconds between lines of progress if the output is no terminal
DRAW_EVERY_S = 0.5  # least seconds between updates of the progress line on a terminal
STAGE_WORDS = {
    "check": "checking",
    "kept": "looking for kept memory",
    "observe": "profiling",
    "ceilings": "measuring ceilings",
    "time": "timing",
    "choose": "finding the fastest",
    "search": "searching for the crossover",
    "trace": "tracing",
}


def say(text: str, style: str = "", console: Console | None = None) -> None:
    """Print a line without control characters; newlines and spaces at its start are kept.

    On a terminal the line wraps between words, and continues with the same indentation.
    """
    console, lead = console or Console(), text[: len(text) - len(text.lstrip("\n "))]
    text, indent = sanitize_line(text), lead.replace("\n", "")
    if console.is_terminal:
        fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
        text = fill(indent + text, console.width).removeprefix(indent)
    console.print(lead + text, style=style or None, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def watching(*, is_quiet: bool = False, is_verbose: bool = False) -> Iterator[Watch]:
    """Show progress inside the context: one updated line on a terminal, an occasional line elsewhere.

    Wrong answers are printed at once. With `is_quiet` nothing else is shown; with `is_verbose` each step has a line of
    its own. The line is drawn only between steps: a thread would take a core from the timed code.
    """
    console = Console(stderr=True)
    is_rewritten = console.is_terminal and not (is_verbose or is_quiet)
    every_s = DRAW_EVERY_S if is_rewritten else LINE_EVERY_S
    stage, drawn_s = "", 0.0

    def watch(progress: Progress) -> None:
        nonlocal stage, drawn_s
        if progress.wrong:
            say(f"WRONG: {progress.cell}: {progress.wrong.partition('. ')[0]}", "bold red", console)
        elif is_verbose:
            say(f"{STAGE_WORDS[progress.stage]} {progress.cell}", console=console)
        elif not is_quiet and (progress.stage != stage or time.monotonic() - drawn_s >= every_s):
            stage, drawn_s = progress.stage, time.monotonic()
            if line is None:
                say(described(progress), console=console)
            else:
                line.update(Text(sanitize_line(described(progress), console.width - 1)), refresh=True)

    drawn = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
    with drawn if is_rewritten else nullcontext() as line:
        yield watch


def described(progress: Progress) -> str:
    """Format a line of progress: stage, percentage done, remaining time, counts of cells by status, and current cell.

    A cell is one implementation on one workload.
    """
    share = 100 * min(1.0, progress.done / progress.total) if progress.total else 100.0
    parts = [f"{STAGE_WORDS[progress.stage]} {share:.0f} %"]
    if progress.left_s is not None:
        minutes, seconds = divmod(round(progress.left_s), 60)
        parts.append(f"about {minutes}:{seconds:02d} left")
    counts = " ".join(f"{number} {status}" for status, number in sorted(progress.counts.items()))
    parts.append(f"cells: {counts}" if counts else "")
    return ", ".join(filter(None, [*parts, progress.cell]))
