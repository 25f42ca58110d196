"""What a report is. Each module of this package that holds an upper-case REPORT is one; its stem is its name.

Idea of showing as a small open interface: criterion.rs, `report.rs`, https://github.com/bheisler/criterion.rs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attnbench.analysis.results import Results


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
