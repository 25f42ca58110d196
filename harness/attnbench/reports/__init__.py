"""The interface of reports. A module of this package that holds an upper-case REPORT is one, by its stem, or several.

Idea of showing as a small open interface: criterion.rs, `report.rs`, https://github.com/bheisler/criterion.rs.
"""

import textwrap
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from attnbench.analysis.results import Results
from attnbench.storage.files import put

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One drawn figure, ready for a page."""

    title: str
    caption: str  # what a reader must know beside it: what was not measured, what hollow markers mean
    svg: str
    png: Callable[[], bytes]  # drawn when asked for: a page needs only the other

    def _repr_svg_(self) -> str:
        """As a notebook shows it."""
        return self.svg

    def save(self, path: Path | str) -> Path:
        """Write it as the name ends, .svg or .png; return the path.

        Raises:
            OSError: it cannot be written.
            ValueError: the name ends otherwise.
        """
        match Path(path).suffix:
            case ".svg":
                return put(Path(path), self.svg)
            case ".png":
                return put(Path(path), self.png())
        raise ValueError(f"{path} is no picture: end its name with .svg or .png")


@dataclass(frozen=True, kw_only=True)
class Report:
    """One way to show results.

    `write` puts its files into an existing folder and returns their paths; `draw`, where there is one, gives the same
    pictures without files. Reports that are not usual are written only if `attnbench report --format` names them.
    """

    summary: str
    write: Callable[[Results, Path], list[Path]]
    draw: Callable[[Results], list[Picture]] | None = None
    is_usual: bool = True


def text_report(file: str, summary: str, text: Callable[[Results], str]) -> Report:
    """The report that is a single file of text; none is written where the text is empty."""

    def write(results: Results, folder: Path) -> list[Path]:
        content, path = text(results), folder / file
        if not content:
            return []
        return [put(path, content)]

    return Report(summary=summary, write=write)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items that have the same key together, in the order in which keys and items come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


NARROWEST, UNBROKEN = 12, 40
"""Characters that a column, and the first column, keep when a table is made narrower."""


def text_lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int = 0,
    right: Collection[int] = (),
    gap: str = "  ",
) -> list[str]:
    """A table as lines of text, its headings first; columns in `right` are aligned to the right.

    Where it is wider than `width`, the widest columns are broken into several lines, the first one last.
    """
    every = [list(headings), *(list(row) for row in rows)]
    sizes = [max(len(row[place]) for row in every) for place in range(len(headings))]
    while width and sum(sizes) + len(gap) * (len(sizes) - 1) > width:
        wide = [place for place, size in enumerate(sizes) if size > (NARROWEST if place else UNBROKEN)]
        if not wide:
            break
        sizes[max(wide, key=lambda place: sizes[place])] -= 1
    lines = []
    for row in every:
        parts = [textwrap.wrap(text, size) or [""] for text, size in zip(row, sizes, strict=True)]
        for number in range(max(map(len, parts), default=0)):
            texts = [own[number] if number < len(own) else "" for own in parts]
            padded = [
                text.rjust(size) if place in right else text.ljust(size)
                for place, (text, size) in enumerate(zip(texts, sizes, strict=True))
            ]
            lines.append(gap.join(padded).rstrip())
    return lines
