"""An inspection as one self-contained page without scripts, with heat maps over the words.

Colours: cividis, which reads alike with any kind of colour vision, https://doi.org/10.1371/journal.pone.0199239.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from attnbench import reports
from attnbench.inspection import text, walkthrough
from attnbench.inspection.oracle_diff import Comparison, Inspection, Outcome
from attnbench.inspection.walkthrough import Numbers, Seen, Walkthrough
from attnbench.reports import Picture, style
from attnbench.reports.story import inlined
from attnbench.storage.files import put, writing_to

PAGE = "inspect.html"
MOST_NUMBERED = 10  # words up to which each weight has room for its number
MOST_PANEL_COLUMNS = 4
LETTERS_AN_INCH = 11
WIDEST = 4.2  # inches of a panel with any number of words
BAR_LAYOUT: dict[str, Any] = {"aspect": 25, "panchor": False}  # keeps panels in place


def prepare(folder: Path) -> None:
    """Create the folder, or remove the pictures of an earlier inspection from it.

    Raises:
        ValueError: the folder cannot be written.
    """
    with writing_to(folder):
        for stem in ("weights", "beside"):
            (folder / f"{stem}.png").unlink(missing_ok=True)
        put(folder / PAGE, "")


def write(inspection: Inspection, folder: Path) -> list[Path]:
    """Write inspect.html and each picture into a prepared folder.

    The template escapes all text from outside.
    """
    pictures = draw(inspection)
    loader = jinja2.FileSystemLoader([Path(__file__).parent, Path(reports.__file__).parent])
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = templates.get_template("page.html.jinja").render(
        inspection=inspection,
        text=text,
        descriptions=walkthrough.descriptions,
        figures={stem: inlined(picture, number) for number, (stem, picture) in enumerate(pictures.items(), start=1)},
        outcomes=tuple(Outcome),
    )
    return [
        put(folder / PAGE, page),
        *(picture.save(folder / f"{stem}.png") for stem, picture in pictures.items()),
    ]


def draw(inspection: Inspection) -> dict[str, Picture]:
    """All pictures, by the stem of their files."""
    with mpl.rc_context(style.SETTINGS):
        pictures = {"weights": _weights(inspection.walks)}
        pairs = [(diff, each) for diff in inspection.diffs for each in diff.comparisons if each.name == "weights"]
        differing = [(diff, each) for diff, each in pairs if each.outcome is not Outcome.agrees]
        for diff, comparison in (differing or pairs)[:1]:  # the first sentence with a difference, or the first
            if comparison.actual is not None and comparison.place is not None:
                pictures["beside"] = _compared(inspection, diff.walk, comparison, comparison.actual, comparison.place)
    return pictures


def _weights(walks: Sequence[Walkthrough]) -> Picture:
    """A row for each sentence, several rows if there are many heads, and a column for each head."""
    num_heads = walks[0].workload.num_heads
    figure, grid = _grid([len(walk.words) for walk in walks], num_heads)
    for own, walk in zip(np.split(np.array(grid), len(walks)), walks, strict=True):
        title = textwrap.fill(f"'{walk.sentence(60)}', head 0", int(_side(len(walk.words)) * LETTERS_AN_INCH))
        titles = [title, *(f"head {head}" for head in range(1, num_heads))]
        for axes, name, weights in zip(own, titles, walk.steps["weights"][0], strict=False):
            image = _heat_map(axes, weights, walk.labels, walk.seen)
            axes.set_title(name, loc="left")
        for axes in own[num_heads:]:
            axes.remove()
    shrink = _bar_share(figure.get_figheight())
    figure.colorbar(image, ax=figure.axes, label="attention weight", shrink=shrink, **BAR_LAYOUT)
    caption = "Each row is a query and adds up to 1; dark is little, bright is much."
    caption += " Grey: hidden by the mask." if walks[0].seen is not None else ""
    return _with_texts(figure, "Attention weights of each head over the words", _about(walks[0]), caption)


def _compared(
    inspection: Inspection, walk: Walkthrough, comparison: Comparison, actual: Numbers, place: tuple[int, ...]
) -> Picture:
    """The oracle's weights, the implementation's and their distance, for each head."""
    differences = np.abs(actual - comparison.oracle)[0]
    finite = np.where(np.isfinite(differences), differences, np.nan)
    largest = float(np.nanmax(finite, initial=comparison.tolerance))
    is_wrong = comparison.outcome is not Outcome.agrees
    heads = sorted({place[1], *range(MOST_PANEL_COLUMNS)} & set(range(actual.shape[1])))[:MOST_PANEL_COLUMNS]
    name = style.label(inspection.implementation)
    figure, grid = _grid([len(walk.words)] * len(heads), 3)
    for row, head in enumerate(heads):
        oracle, theirs, apart = grid[3 * row : 3 * row + 3]
        image = _heat_map(oracle, comparison.oracle[0, head], walk.labels)
        _heat_map(theirs, actual[0, head], walk.labels)
        difference = _heat_map(apart, finite[head], walk.labels, most=largest)
        oracle.set_title(f"the oracle, head {head}", loc="left")
        theirs.set_title(f"{name}, head {head}", loc="left")
        apart.set_title("difference", loc="left")
        if place[1] == head and is_wrong:
            corner = (place[-1] - 0.5, place[-2] - 0.5)
            for axes in (oracle, theirs, apart):
                frame = Rectangle(corner, 1, 1, fill=False, edgecolor="#D55E00", linewidth=2.5, zorder=5, clip_on=False)
                axes.add_patch(frame)
    below: dict[str, Any] = {"location": "bottom", "anchor": (0.0, 1.0), **BAR_LAYOUT}
    width = figure.get_figwidth() / 3
    weights = [*grid[0::3], *grid[1::3]]
    figure.colorbar(image, ax=weights, label="attention weight", shrink=_bar_share(2 * width), **below)
    figure.colorbar(difference, ax=grid[2::3], label="difference of weights", shrink=_bar_share(width), **below)
    caption = f"Largest difference {comparison.largest:.2g}; above {comparison.tolerance:.2g} it counts."
    if is_wrong:
        caption += f" The frame marks it: {comparison.where(walk.words)}."
    title = f"The weights of {name} compared with the oracle's"
    return _with_texts(
        figure, title, f"'{walk.sentence(60)}', {_about(walk)}", f"float32 compared with float64. {caption}"
    )


def _grid(lengths: Sequence[int], num_columns: int) -> tuple[Figure, list[Axes]]:
    """A figure of square panels that grow with the number of words: a row for each of `lengths`, wrapped if long."""
    rows_each = -(-num_columns // MOST_PANEL_COLUMNS)
    columns = min(num_columns, MOST_PANEL_COLUMNS)
    sides = [_side(length) for length in lengths for _ in range(rows_each)]
    figure = Figure(figsize=(1.6 + max(sides) * columns, 1.3 + sum(sides)), layout="constrained")
    grid = figure.subplots(len(sides), columns, squeeze=False, height_ratios=sides).ravel()
    for axes in grid:
        axes.set_anchor("NW")
    return figure, list(grid)


def _side(num_words: int) -> float:
    """The side of a panel in inches."""
    return 1.3 + min(0.34, WIDEST / num_words) * max(4, num_words)


def _heat_map(
    axes: Axes, values: Numbers, labels: Sequence[str], seen: Seen | None = None, most: float = 1.0
) -> AxesImage:
    """Values (T, S) as colours with words on both axes; hidden pairs are grey, non-finite values white."""
    colours = mpl.colormaps["cividis"].with_extremes(bad="white")
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0.0, vmax=most, aspect="equal")
    axes.grid(visible=False)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(labelsize=9.5 if len(labels) <= MOST_NUMBERED else 7.5)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    for row, line in enumerate(values.tolist()):
        for column, value in enumerate(line):
            if seen is not None and not seen[row, column]:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="#e4e4e4", edgecolor="white"))
            elif len(labels) <= MOST_NUMBERED:
                is_finite = bool(np.isfinite(value))
                number = str(value) if not is_finite else f"{value:.2f}" if most >= 0.1 else f"{value:.0e}"  # noqa: PLR2004
                colour = "white" if is_finite and value < 0.55 * most else "black"
                axes.text(column, row, number, ha="center", va="center", fontsize=7.5, color=colour)
    return image


def _bar_share(length: float) -> float:
    """The share of a length in inches that a colour bar needs."""
    return min(0.8, 4.0 / length)


def _with_texts(figure: Figure, title: str, about: str, caption: str) -> Picture:
    """The picture with a title above and a caption below."""
    width = int(figure.get_size_inches()[0] * 13)
    above = "\n".join(textwrap.fill(line, width) for line in (title, about) if line)
    figure.suptitle(above, x=0.01, ha="left", fontsize=11.5)
    figure.supxlabel(textwrap.fill(caption, int(width * 1.25)), x=0.01, ha="left", fontsize=8, color="#555555")
    return style.picture(figure, title, ": ".join(part for part in (title, about) if part) + f". {caption}")


def _about(walk: Walkthrough) -> str:
    point = walk.workload
    groups = "" if point.num_heads == point.num_kv_heads else f" G={point.num_kv_heads}"
    mask = "no mask" if point.mask == "none" else point.mask
    return f"{mask}, H={point.num_heads}{groups} K={point.head_dim}, seed {point.seed}"
