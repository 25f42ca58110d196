"""How far a run is, on standard error."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from attnbench.processes import session as run

LINE_EVERY_S = 10.0
DRAW_EVERY_S = 0.5
"""Of the bar: it is drawn between two steps alone, since a thread that draws would take a core of what is timed."""
STAGE_WORDS = {
    "check": "checking",
    "observe": "seeing what runs",
    "ceilings": "finding ceilings",
    "time": "timing",
    "trace": "tracing",
}


@contextmanager
def watching() -> Iterator[run.Watch]:
    """A bar on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(console)
        return
    columns = (
        TextColumn("[bold]{task.fields[stage]}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[counts]}"),
        TextColumn("[dim]{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=1.0, stage="starting", left="", counts="")
        stage, drawn_s = "", 0.0

        def show_progress(seen: run.Progress) -> None:
            nonlocal stage, drawn_s
            is_due = seen.stage != stage or time.monotonic() - drawn_s >= DRAW_EVERY_S
            if is_due:
                stage, drawn_s = seen.stage, time.monotonic()
            bar.update(
                task,
                completed=seen.done,
                total=seen.total,
                description=escape(seen.cell),
                stage=STAGE_WORDS[seen.stage],
                left=_left(seen),
                counts=_counts(seen.counts),
                refresh=is_due,
            )

        yield show_progress


def _plain_lines(console: Console) -> run.Watch:
    stage, told_s = "", 0.0

    def tell(seen: run.Progress) -> None:
        nonlocal stage, told_s
        if seen.stage == stage and time.monotonic() - told_s < LINE_EVERY_S:
            return
        stage, told_s = seen.stage, time.monotonic()
        share = 100 * min(1.0, seen.done / seen.total) if seen.total else 100.0
        parts = [f"{STAGE_WORDS[seen.stage]} {share:.0f} %", _counts(seen.counts), _left(seen), seen.cell]
        console.print(", ".join(part for part in parts if part), markup=False, highlight=False, soft_wrap=True)

    return tell


def _left(seen: run.Progress) -> str:
    if seen.left_s is None:
        return ""
    minutes, seconds = divmod(round(seen.left_s), 60)
    return f"about {minutes}:{seconds:02d} left"


def _counts(counts: dict[str, int]) -> str:
    return " ".join(f"{number} {status}" for status, number in sorted(counts.items()))
