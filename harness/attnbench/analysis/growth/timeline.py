"""What one call holds, event by event, with the operators behind its largest steps; a panel for each implementation."""

import textwrap
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attnbench.analysis.growth.attempts import Followed
from attnbench.analysis.growth.told import heading
from attnbench.reports import Picture, style, words
from attnbench.storage.memory_events import held, largest
from attnbench.units import scale_of, show

TITLE = "What one call holds beyond its inputs, event by event"
STEPS = 6
"""So many allocations are named."""
WORTH_NAMING = 0.01
"""Of the peak: a smaller allocation is not named."""
NOTE = (
    "Each step is an allocation or a release, in order. The panels have scales of their own. Numbers mark the largest "
    "allocations, with the operator that was running; what is held at the end is the result, and what the graph saved."
)
LONGEST_NAME = 44
PANELS_A_PAGE = 6


def pictures(followed: Sequence[Followed]) -> list[Picture]:
    """At most six panels each, those of one workload together."""
    titles: dict[str, list[Followed]] = {}
    for each in followed:
        letter = "T" if each.growth.panel.axis == "seq_len" else "S"
        titles.setdefault(f"{heading(each.growth)}, {letter}={each.length}", []).append(each)
    return [
        _picture(title, members[start : start + PANELS_A_PAGE])
        for title, members in titles.items()
        for start in range(0, len(members), PANELS_A_PAGE)
    ]


def _picture(title: str, members: Sequence[Followed]) -> Picture:
    with mpl.rc_context(style.SETTINGS):
        figure = Figure(figsize=(10.0, 1.1 + 2.3 * len(members)), layout="constrained")
        for axes, each in zip(figure.subplots(len(members), squeeze=False).ravel(), members, strict=True):
            _panel(axes, each)
        figure.suptitle(f"{TITLE}\n{title}", x=0.01, ha="left", fontsize=11.5)
        note = "\n".join(textwrap.wrap(NOTE, 160))
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="#555555")
    return style.picture(figure, TITLE, f"{TITLE}: {title}. {NOTE}")


def _panel(axes: Axes, each: Followed) -> None:
    events, look = each.timeline.events, style.look(each.growth.implementation)
    levels = [0, *held(events)]
    levels.append(levels[-1])  # so that the last one is seen
    peak = each.timeline.peak_bytes
    axes.fill_between(range(len(levels)), levels, step="post", color=look.colour, alpha=0.25, linewidth=0)
    axes.step(range(len(levels)), levels, where="post", color=look.colour, linewidth=1.6)
    named = [place for place in largest(events, STEPS) if events[place].num_bytes >= WORTH_NAMING * peak]
    told = []
    for mark, place in enumerate(named, start=1):
        name = words.plain(events[place].operator.removeprefix("aten::"), limit=LONGEST_NAME) or "outside operators"
        told.append(f"{mark}  {name}  +{show(events[place].num_bytes, 'bytes')}")
        axes.annotate(
            str(mark), (place + 1, levels[place + 1]), (0, 4), textcoords="offset points", ha="center", fontsize=8.5
        )
    axes.text(1.02, 1.0, "\n".join(told), transform=axes.transAxes, va="top", fontsize=8.5, linespacing=1.5)
    axes.set_xlim(0, len(levels) - 1)
    axes.set_ylabel("held")
    drawn = "" if len(events) == each.timeline.num_events else f": {each.timeline.num_events}, stretches drawn together"
    axes.set_xlabel(f"allocations and releases{drawn}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    divisor, symbol = scale_of(max(peak, 1), "bytes")
    axes.set_yticks(
        [divisor * tick for tick in MaxNLocator(nbins=4, steps=[1, 2, 5, 10]).tick_values(0, peak / divisor)]
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / divisor:g} {symbol}"))
    axes.set_ylim(0, 1.18 * max(peak, 1))
    axes.set_title(f"{style.label(each.growth.implementation)}: peak {show(peak, 'bytes')}", loc="left")
