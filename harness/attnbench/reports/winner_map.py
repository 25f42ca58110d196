"""Who wins where: a map with a row for each kind of workload and a column for each length."""

import textwrap
from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from attnbench.analysis.comparisons import Answer, answers, doubts
from attnbench.analysis.results import Results
from attnbench.analysis.table import varying
from attnbench.reports import Picture, cells, grouped, style
from attnbench.units import plain, significant

FEWEST = 2
"""Of one workload a sentence says more."""
MOST_ROWS, MOST_COLUMNS = 16, 6
PALE = 0.3
"""How much of an implementation's colour a cell has: its text stays readable."""
TITLE_LEN = 44
FEW = 2
"""Of the implementations that may be fastest, so many are named in a cell."""


def draw(results: Results) -> list[Picture]:
    """The map of a run; none where two states of the code are compared, or fewer than two workloads."""
    if results.plan.sides is not None:
        return []
    found = answers(results)
    if len(found) < FEWEST:
        return []
    table = cells.shown(results)
    axes = varying(table)
    titles = {workload: cells.apart(own, axes) or "all" for workload, own in table.groupby("workload", sort=False)}
    kinds = grouped(found, lambda each: titles[each.workload.id])
    lengths = Counter(_length(each) for each in sorted(found, key=_size))
    usual = [length for length, _ in lengths.most_common(MOST_COLUMNS)]
    shown, columns = list(kinds)[:MOST_ROWS], [length for length in lengths if length in usual]
    cut = len(kinds) > len(shown) or len(lengths) > len(columns)

    def fill(panel: Axes, _: int) -> None:
        for row, kind in enumerate(shown):
            for each in kinds[kind]:
                if _length(each) in columns:
                    _draw_cell(panel, each, columns.index(_length(each)), row)
        panel.set_xlim(0, len(columns))
        panel.set_ylim(len(shown), 0)
        panel.set_xticks([place + 0.5 for place in range(len(columns))], columns)
        names = ["\n".join(textwrap.wrap(kind, TITLE_LEN)) for kind in shown]
        panel.set_yticks([place + 0.5 for place in range(len(shown))], names)
        panel.tick_params(length=0)
        panel.grid(visible=False)
        for side in panel.spines.values():
            side.set_visible(False)

    doubt = "Doubtful, the session was disturbed: see the summary. " if doubts(results) else ""
    more = " More rows and columns are in the tables." if cut else ""
    note = f"{doubt}A factor is by how much faster than the baseline. Hatched: some are undecided.{more}"
    size = (3.9 + 1.45 * len(columns), 1.2 + 0.45 * len(shown))
    title = "Who is the fastest where"
    return [style.sheet([0], fill, size, title=title, subtitle=cells.shared(table), note=note)]


def _length(each: Answer) -> str:
    return f"T={cells.length(each.workload.axes())}"


def _size(each: Answer) -> tuple[int, int]:
    return each.workload.kv_len, each.workload.seq_len


def _draw_cell(panel: Axes, each: Answer, column: int, row: int) -> None:
    """A rectangle in the pale colour of the fastest by verdict, with its name and its lead over the baseline."""
    is_clear = not each.undecided
    colour = _paler(style.look(each.fastest).colour) if is_clear else (0.95, 0.95, 0.95)
    hatch = "" if is_clear else "////"
    place = (column + 0.02, row + 0.04)
    panel.add_patch(Rectangle(place, 0.96, 0.92, facecolor=colour, edgecolor="#d0d0d0", hatch=hatch, linewidth=0))
    lines = [_names([each.fastest, *(own.implementation for own in each.undecided)])]
    if is_clear and each.faster:
        lines.append(f"{significant(1 / each.faster[0].ratio, 3)}x")
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0} if not is_clear else None
    panel.text(column + 0.5, row + 0.5, "\n".join(lines), ha="center", va="center", fontsize=8, bbox=box)


def _names(names: Sequence[str]) -> str:
    shown = [plain(name, limit=16) for name in names[:FEW]]
    return ", ".join(shown) + (f"\nor {len(names) - FEW} more" if len(names) > FEW else "")


def _paler(colour: str) -> tuple[float, float, float]:
    red, green, blue = (1.0 - PALE * (1.0 - part) for part in to_rgb(colour))
    return red, green, blue


REPORT = style.report("winner_map", "who is the fastest on which shapes, as SVG and PNG", draw)
