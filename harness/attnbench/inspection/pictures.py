"""Pictures of an inspection: heat maps of the weights over the words, and the largest weight against K.

Colours: cividis, which reads alike with any kind of colour vision, https://doi.org/10.1371/journal.pone.0199239.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnbench.inspection.found import Beside, Compared, Found, Numbers, Walk
from attnbench.inspection.tables import growing
from attnbench.reports import Picture, style
from attnbench.reports.words import plain

COLOURS = "cividis"
HIDDEN = "#e4e4e4"
MARK = "#D55E00"
MOST_NUMBERED = 10  # words beside which each weight can still be read as a number
DARK_BELOW = 0.55
LONGEST_SENTENCE = 60
MOST_COLUMNS = 4
LETTERS_AN_INCH = 11
WIDEST = 4.2  # inches of a panel, however many words
BAR = 4.0  # inches of a colour bar
BESIDE: dict[str, Any] = {"aspect": 25, "panchor": False}  # panels stay where they are


def draw(found: Found) -> dict[str, Picture]:
    """Every picture by the stem of its files."""
    with mpl.rc_context(style.SETTINGS):
        return _draw(found)


def _draw(found: Found) -> dict[str, Picture]:
    made = {"weights": _weights(found.walks)}
    if found.joined is not None:
        made["joined"] = _joined(found.joined, [len(walk.words) for walk in found.walks])
    made["mask"] = _mask(found.walks[0])
    beside, compared = _to_show(found)
    if compared is not None and compared.here is not None:
        made["beside"] = _beside(found, beside, compared, compared.here)
    made["scaling"] = _scaling(found)
    return made


def _to_show(found: Found) -> tuple[Beside, Compared | None]:
    """The weights of the first sentence where they differ, or of the first."""
    pairs = [(beside, each) for beside in found.besides for each in beside.compared if each.name == "weights"]
    differing = [(beside, each) for beside, each in pairs if each.largest > each.allowed]
    return next(iter(differing or pairs), (found.besides[0], None))


def _weights(walks: Sequence[Walk]) -> Picture:
    """A row for each sentence, or several where there are many heads, and a column for each head."""
    figure, grid = _grid([len(walk.words) for walk in walks], walks[0].workload.num_heads)
    places = iter(np.split(np.array(grid), len(walks)))
    for walk, own in zip(walks, places, strict=True):
        heads = walk.step("weights").values[0]
        for head, (axes, weights) in enumerate(zip(own, heads, strict=False)):
            image = _heat(axes, weights, walk.labels, walk.masking.seen if walk.masking.is_chosen else None)
            title = f"'{_sentence(walk)}', head {head}" if head == 0 else f"head {head}"
            axes.set_title(textwrap.fill(title, int(_side(len(walk.words)) * LETTERS_AN_INCH)), loc="left")
        for axes in own[len(heads) :]:
            axes.remove()
    told = "Each row is a query and adds up to 1; dark is little, bright is much."
    told += " Grey: hidden by the mask." if walks[0].masking.is_chosen else ""
    return _finished(figure, image, "Attention weights of each head over the words", _about(walks[0]), told)


def _joined(walk: Walk, lengths: Sequence[int]) -> Picture:
    """All sentences in one row: what the words of one weigh in the other."""
    values = walk.step("weights").values[0]
    figure, grid = _grid([len(walk.words)], len(values))
    for head, (axes, weights) in enumerate(zip(grid, values, strict=False)):
        image = _heat(axes, weights, walk.labels, None, most=float(values.max()))
        axes.set_title(f"head {head}", loc="left")
        for edge in np.cumsum(lengths)[:-1]:
            axes.axhline(edge - 0.5, color="white", linewidth=2.5)
            axes.axvline(edge - 0.5, color="white", linewidth=2.5)
    for axes in grid[len(values) :]:
        axes.remove()
    told = "All sentences in one row, where every word sees every other; the white lines part the sentences."
    return _finished(figure, image, "Attention weights between the sentences", _about(walk), told)


def _mask(walk: Walk) -> Picture:
    """Two rows: without a mask and under one; a column for each head."""
    effect = walk.masking
    heads = walk.workload.num_heads
    shown = min(heads, MOST_COLUMNS)
    figure, grid = _grid([len(walk.words)] * 2, shown)
    for row, (name, weights, seen) in enumerate(
        [("without a mask", effect.without, None), (f"under {effect.mask}", effect.under, effect.seen)]
    ):
        for head in range(shown):
            axes = grid[row * shown + head]
            image = _heat(axes, weights[head], walk.labels, seen)
            axes.set_title(f"{name}, head {head}", loc="left")
    told = f"{effect.mask}: {effect.summary}. Grey: hidden. What is hidden has weight 0, and the rest of its row more."
    told += f" Heads 0 to {shown - 1} of {heads}." if shown < heads else ""
    return _finished(figure, image, "What a mask changes", f"'{_sentence(walk)}', {_about(walk)}", told)


def _beside(found: Found, beside: Beside, compared: Compared, here: Numbers) -> Picture:
    """For each head the oracle's weights, the implementation's, and how far apart they are."""
    gap = compared.differences
    assert gap is not None
    walk = next(walk for walk in found.walks if walk.words == beside.words)
    finite = np.where(np.isfinite(gap), gap, np.nan)[0]
    largest = float(np.nanmax(finite, initial=compared.allowed))
    heads = [compared.place[1]] if compared.place is not None else []
    heads = sorted({*heads, *range(MOST_COLUMNS)} & set(range(here.shape[1])))[:MOST_COLUMNS]
    figure, grid = _grid([len(walk.words)] * len(heads), 3)
    for row, head in enumerate(heads):
        oracle, theirs, apart = grid[3 * row : 3 * row + 3]
        image = _heat(oracle, compared.oracle[0, head], walk.labels, None)
        _heat(theirs, here[0, head], walk.labels, None)
        difference = _heat(apart, finite[head], walk.labels, None, most=largest)
        oracle.set_title(f"the oracle, head {head}", loc="left")
        theirs.set_title(f"{style.label(found.implementation)}, head {head}", loc="left")
        apart.set_title("difference", loc="left")
        if compared.place is not None and compared.place[1] == head and compared.largest > compared.allowed:
            for axes in (oracle, theirs, apart):
                _mark(axes, compared.place[-2], compared.place[-1])
    below: dict[str, Any] = {"location": "bottom", "anchor": (0.0, 1.0), **BESIDE}
    width = figure.get_figwidth() / 3
    weights = [*grid[0::3], *grid[1::3]]
    figure.colorbar(image, ax=weights, label="attention weight", shrink=_shrunk(2 * width), **below)
    figure.colorbar(difference, ax=grid[2::3], label="difference of weights", shrink=_shrunk(width), **below)
    told = f"Largest difference {compared.largest:.2g}; above {compared.allowed:.2g} it counts."
    if compared.largest > compared.allowed:
        told += f" The frame marks it: {compared.where(beside.words)}."
    title = f"{style.label(found.implementation)} beside the oracle: the weights it uses"
    return _headed(figure, title, f"'{_sentence(walk)}', {_about(walk)}", f"float32 beside float64. {told}")


def _scaling(found: Found) -> Picture:
    """The largest weight against K, with the division by sqrt(K) and without."""
    growth = found.growth
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    kinds = (
        ("query @ key", growth.without, "#D55E00", "s", "--"),
        ("query @ key / sqrt(K)", growth.with_scale, "#0072B2", "o", "-"),
    )
    for name, values, colour, marker, line in kinds:
        axes.fill_between(growth.widths, values[:, 0], values[:, 2], color=colour, alpha=0.18, linewidth=0)
        axes.plot(growth.widths, values[:, 1], color=colour, marker=marker, linestyle=line, label=name)
    axes.axhline(1 / growth.num_keys, color=style.INK, linewidth=1, linestyle=":")
    note = f"all {growth.num_keys} keys alike"
    axes.annotate(note, (growth.widths[-1], 1 / growth.num_keys), (0, 4), textcoords="offset points", ha="right")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(growth.widths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("head width K")
    axes.set_ylabel(f"largest of {growth.num_keys} weights")
    axes.legend(title="softmax of")
    told = "Standard normal query and keys; line: median, band: the middle half of the draws."
    return _headed(figure, "Why scores are divided by sqrt(K)", "", f"{growing(growth)} {told}")


def _grid(lengths: Sequence[int], num_columns: int) -> tuple[Figure, list[Axes]]:
    """A figure of square panels that grow with the number of words: a row for each of `lengths`, broken where long."""
    rows_each = -(-num_columns // MOST_COLUMNS)
    columns = min(num_columns, MOST_COLUMNS)
    sides = [_side(length) for length in lengths for _ in range(rows_each)]
    size = (1.6 + max(sides) * columns, 1.3 + sum(sides))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(sides), columns, squeeze=False, height_ratios=sides).ravel()
    for axes in grid:
        axes.set_anchor("NW")
    return figure, list(grid)


def _side(num_words: int) -> float:
    """The side of a panel in inches."""
    return 1.3 + min(0.34, WIDEST / num_words) * max(4, num_words)


def _heat(
    axes: Axes,
    values: Numbers,
    labels: Sequence[str],
    seen: Any = None,  # noqa: ANN401 - (T, S) boolean, or None where nothing is hidden
    most: float = 1.0,
) -> AxesImage:
    """Values (T, S) as colours with words on both axes; hidden pairs are grey, and what is not finite stays white."""
    colours = mpl.colormaps[COLOURS].with_extremes(bad="white")
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0.0, vmax=most, aspect="equal")
    axes.grid(visible=False)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(labelsize=9.5 if len(labels) <= MOST_NUMBERED else 7.5)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if seen is not None and not seen[row, column]:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=HIDDEN, edgecolor="white"))
            elif len(labels) <= MOST_NUMBERED:
                _number(axes, row, column, float(value), most)
    return image


def _number(axes: Axes, row: int, column: int, value: float, most: float) -> None:
    is_finite = bool(np.isfinite(value))
    text = str(value) if not is_finite else f"{value:.2f}" if most >= 0.1 else f"{value:.0e}"  # noqa: PLR2004
    colour = "white" if is_finite and value < DARK_BELOW * most else "black"
    axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=colour)


def _mark(axes: Axes, row: int, column: int) -> None:
    frame = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=MARK, linewidth=2.5, zorder=5)
    frame.set_clip_on(False)
    axes.add_patch(frame)


def _finished(figure: Figure, image: AxesImage, title: str, about: str, told: str) -> Picture:
    """With one colour bar for all panels."""
    figure.colorbar(image, ax=figure.axes, label="attention weight", shrink=_shrunk(figure.get_figheight()), **BESIDE)
    return _headed(figure, title, about, told)


def _shrunk(length: float) -> float:
    """The part of a length that a colour bar takes."""
    return min(0.8, BAR / length)


def _headed(figure: Figure, title: str, about: str, told: str) -> Picture:
    """With a title above and what must be known below."""
    width = int(figure.get_size_inches()[0] * 13)
    above = "\n".join(textwrap.fill(line, width) for line in (title, about) if line)
    figure.suptitle(above, x=0.01, ha="left", fontsize=11.5)
    figure.supxlabel(textwrap.fill(told, int(width * 1.25)), x=0.01, ha="left", fontsize=8, color="#555555")
    return style.picture(figure, title, ": ".join(part for part in (title, about) if part) + f". {told}")


def _sentence(walk: Walk) -> str:
    return plain(" ".join(walk.words), limit=LONGEST_SENTENCE)


def _about(walk: Walk) -> str:
    point = walk.workload
    groups = "" if point.num_heads == point.num_kv_heads else f" G={point.num_kv_heads}"
    mask = "no mask" if point.mask == "none" else point.mask
    return f"{mask}, H={point.num_heads}{groups} K={point.head_dim}, seed {point.seed}"
