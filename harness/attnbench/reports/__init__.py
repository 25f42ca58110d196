"""The interface of reports. A module of this package defines REPORT: a `Report`, or a dict of several by name.

A single report is named like its file. Source of the small, open interface: criterion.rs, `report.rs`,
https://github.com/bheisler/criterion.rs.
"""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.analysis.results import Results
from attnbench.plugins import plugs
from attnbench.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure with its title and caption."""

    title: str
    caption: str  # title, subtitle, and notes on missing points and on what the bars show
    figure: "Figure"

    @cached_property
    def png(self) -> bytes:
        """The bytes of the picture as a PNG file at 160 dots per inch; it is drawn only once."""
        return self._drawn("png")

    def _repr_png_(self) -> bytes:
        return self.png

    def save(self, path: Path | str) -> Path:
        """Write the picture in the format that the suffix of the path names: .png, .svg or .pdf. Return the path.

        Raises:
            OSError: the file cannot be written.
            ValueError: the path has another suffix.
        """
        suffix = Path(path).suffix
        if suffix not in {".png", ".svg", ".pdf"}:
            raise ValueError(f"{path} is not a picture file: end its name with .png, .svg or .pdf")
        return write_atomically(Path(path), self.png if suffix == ".png" else self._drawn(suffix[1:]))

    def _drawn(self, form: str) -> bytes:
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks are drawn as boxes
            self.figure.savefig(file, format=form, dpi=160)
        self.figure.set_layout_engine("none")  # a second layout would take as long, and change the picture
        return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class Report:
    """A way to present results: a text from `text`, or a picture from `draw` (None: there is nothing to draw).

    At their end, `attnbench run` and `compare` write reports with `is_usual`; `attnbench report --format` writes any.
    """

    summary: str
    file: str  # name of the file in the run's folder
    text: Callable[[Results], str] | None = None
    draw: Callable[[Results], Picture | None] | None = None
    is_usual: bool = False

    def write(self, results: Results, folder: Path) -> list[Path]:
        """Write the report into an existing folder; return its path in a list, empty if there is nothing to draw.

        Raises:
            OSError: the file cannot be written.
        """
        if self.text is not None:
            return [write_atomically(folder / self.file, self.text(results))]
        picture = None if self.draw is None else self.draw(results)
        return [] if picture is None else [picture.save(folder / self.file)]


def write_usual(results: Results, to: Path | None = None) -> list[str]:
    """Write the reports with `is_usual` into the folder `to`, by default the run's; return a line for each failure.

    The failure of one report does not affect the others.

    Raises:
        ValueError: the folder cannot be written.
    """
    failed, folder = [], to or results.folder
    for name, plug in plugs("attnbench.reports", "REPORT").items():
        try:
            if plug.is_usual:
                plug.write(results, folder)
        except OSError as error:
            again = f"finished cells are kept: free some space or fix this, then: attnbench report {results.folder}"
            raise ValueError(f"cannot write {error.filename or folder}: {error.strerror}; {again}") from None
        except Exception as error:  # noqa: BLE001 - a broken report must not affect the others
            failed.append(f"report {name} failed: {type(error).__name__}: {error}")
    return failed
