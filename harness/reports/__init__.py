"""What a report is. Each module of this package that holds an upper-case REPORT is one; its stem is its name.

Idea of showing as a small open interface: criterion.rs, `report.rs`, https://github.com/bheisler/criterion.rs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

from harness.store import Results


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One drawn figure, ready for a page."""

    title: str
    caption: str  # what a reader must know beside it: what was not measured, what hollow markers mean
    svg: str
    png: Callable[[], bytes]  # drawn when asked for: a page needs only the other


@dataclass(frozen=True, kw_only=True)
class Report:
    """One way to show results.

    `write` puts its files into an existing folder and returns their paths; `draw`, where there is one, gives the same
    pictures without files, and report.html shows them.
    """

    summary: str
    write: Callable[[Results, Path], list[Path]]
    draw: Callable[[Results], list[Picture]] | None = None


Draw = Callable[[Results], list[Picture]]


def once(draw: Draw) -> Draw:
    """Keeps what was drawn last: a page shows the pictures that were written just before, of the same results."""
    last: list[tuple[Results, list[Picture]]] = []

    @wraps(draw)
    def remembered(results: Results) -> list[Picture]:
        if not last or last[0][0] is not results:
            last[:] = [(results, draw(results))]
        return last[0][1]

    return remembered
