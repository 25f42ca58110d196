"""From which length on somebody is faster: the crossings of the run, each with its interval."""

import textwrap

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.crossings import Crossing, crossings
from attnbench.analysis.results import Results
from attnbench.analysis.table import varying
from attnbench.reports import Picture, cells, style
from attnbench.storage.records import Verdict
from attnbench.units import plain

MOST_ROWS = 16
TITLE_LEN = 40
SPARE = 1.35
"""The axis goes so far beyond what is drawn."""


def draw(results: Results) -> list[Picture]:
    """The picture of a run; none where nobody changes places with the baseline."""
    if results.plan.sides is not None:
        return []
    found = crossings(results, lambda workload: cells.titles(results)[workload.id])
    if not found:
        return []
    table = cells.shown(results)
    table = table[table["workload"].isin([each.workload.id for each in found])]
    axes = varying(table)
    titles = {workload: cells.apart(own, axes) for workload, own in table.groupby("workload", sort=False)}
    shown, bases = found[:MOST_ROWS], {each.reference for each in found}

    def fill(panel: Axes, _: int) -> None:
        panel.set_xscale("log", base=2)
        panel.set_xlim(min(each.before for each in shown) / SPARE, max(each.after for each in shown) * SPARE)
        panel.set_ylim(len(shown) - 0.4, -0.6)
        for place, each in enumerate(shown):
            _draw_row(panel, each, place)
        names = ["\n".join(textwrap.wrap(_name(titles[each.workload.id], each), TITLE_LEN)) for each in shown]
        panel.set_yticks(range(len(shown)), names)
        style.ticks(panel.xaxis, LogLocator(base=2, numticks=12))
        panel.set_xlabel(results.plan.ladders[0].axis if results.plan.ladders else "length in keys")
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=False, axis="y")

    doubt = "Doubtful, the session was disturbed: see the summary. " if doubts(results) else ""
    more = f" {len(found) - MOST_ROWS} more are not drawn." if len(found) > MOST_ROWS else ""
    note = (
        f"{doubt}The dot is where the ratio of times is 1, by a line between the lengths that were measured; the bar "
        f"is where the ends of the ratios' 95 % intervals are 1. Pale: between the lengths that are decided.{more}"
    )
    size = (9.0, 1.5 + 0.6 * len(shown))
    whom = f"than {style.label(bases.pop())}, or the other way round" if len(bases) == 1 else "than whom"
    title = f"From which {results.plan.ladders[0].axis if results.plan.ladders else 'length'} on who is faster {whom}"
    return [style.sheet([0], fill, size, title=title, subtitle=cells.shared(table), note=note)]


def _name(title: str, each: Crossing) -> str:
    """What sets a row apart; with its query length, where that is not the key length."""
    is_square = each.workload.seq_len == each.workload.kv_len
    return ", ".join(filter(None, [title.replace(cells.DOT, ", "), "" if is_square else f"T={each.workload.seq_len}"]))


def _draw_row(panel: Axes, each: Crossing, place: int) -> None:
    """Between the lengths that are decided a pale band, the interval on it, and who is faster on either side."""
    colour = style.look(each.implementation).colour
    low, high = each.low or each.before, each.high or each.after
    panel.plot([each.before, each.after], [place, place], color=colour, alpha=0.2, linewidth=7, solid_capstyle="butt")
    panel.plot([low, high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
    panel.plot([each.at], [place], marker="o", ms=7, mfc=colour, mec="white")
    names = [plain(each.reference, limit=20), plain(each.implementation, limit=20)]
    first, later = names if each.verdict is Verdict.faster else reversed(names)
    text = {"va": "bottom", "fontsize": 8, "color": style.INK}
    panel.annotate(f"{first} is faster", (each.before, place), (0, 5), textcoords="offset points", ha="left", **text)
    words = f"{later} from {each.at:.3g} on ({low:.3g} to {high:.3g})"
    panel.annotate(words, (each.after, place), (0, 5), textcoords="offset points", ha="right", **text)


REPORT = style.report("crossover_plot", "from which length on who is faster, as SVG and PNG", draw)
