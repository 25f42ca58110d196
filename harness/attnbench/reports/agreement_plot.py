"""Every compared tensor's error as a multiple of its tolerance, by dtype and implementation; above 1 it is wrong."""

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from attnbench.analysis.results import Results
from attnbench.analysis.table import table
from attnbench.reports import Picture, grouped, style
from attnbench.reports.cells import absent, shared
from attnbench.storage.records import Arm, Record
from attnbench.workloads.workload import DTYPES

FLOOR, CEILING = 1e-4, 1e4
"""Shares beyond these are drawn at the edge: an exact match would need a place at minus infinity."""
TITLE = "Error / tolerance against the float64 oracle (above 1 is wrong)"
HOW = (
    "Each dot is the largest error of one tensor (the output or a gradient) on one kind of input at one workload; the "
    "large mark is the largest of all; a cross at the right edge is an answer that is not finite."
)


def pictures(results: Results) -> list[Picture]:
    """One panel for each dtype, one row for each implementation; none where nothing was compared."""
    checked = [record for record in results.records if record.agreement is not None]
    dtypes = [dtype for dtype in DTYPES if any(record.workload.dtype == dtype for record in checked)]
    if not dtypes:
        return []
    left_out, cells = absent(results), table(results)
    by_arm = grouped((one for one in results.records if one.implementation not in left_out), lambda one: one.arm)
    shown = cells[cells["workload"].isin({record.workload.id for record in checked})]
    return [
        style.sheet(
            dtypes,
            lambda axes, dtype: _draw_panel(axes, dtype, by_arm),
            (2.6 + 4.2 * len(dtypes), 1.6 + 0.3 * len(by_arm)),
            title=TITLE,
            subtitle=shared(shown),
            note=" ".join([HOW, *_unchecked(by_arm)]),
            num_columns=len(dtypes),
            sharey=True,
        )
    ]


def _draw_panel(axes: Axes, dtype: str, by_arm: dict[Arm, list[Record]]) -> None:
    axes.set_xscale("log")
    shares = {
        arm: [share for record in records if record.workload.dtype == dtype for share in _shares(record)]
        for arm, records in by_arm.items()
    }
    inside = [share for mine in shares.values() for share in mine if share is not None]
    low, high = min([*inside, 0.1]) / 2, max([*inside, 5.0]) * 3
    axes.set_xlim(low, high)
    axes.axvspan(1.0, high, color="#f6dcd3", alpha=0.6, lw=0, zorder=0)
    axes.axvline(1.0, color=style.INK, linewidth=1.2, zorder=2)
    for place, (arm, mine) in enumerate(shares.items()):
        _draw_dots(axes, place, arm, mine)
        if not mine:
            axes.text(low * 1.2, place, "not compared", va="center", fontsize=8, color="#6a6a6a", style="italic")
    axes.set_yticks(range(len(shares)), [style.label(arm) for arm in shares])
    axes.set_ylim(len(shares) - 0.5, -0.5)
    style.ticks(axes.xaxis, LogLocator(subs=(1.0,), numticks=9))
    axes.set_xlabel("error / tolerance (shaded: wrong)")
    axes.set_title(dtype, loc="left")


def _draw_dots(axes: Axes, place: int, name: Arm, shares: list[float | None]) -> None:
    """Dots spread over the row's height in the order of the run, the largest with an edge."""
    seen, (low, high) = style.look(name), axes.get_xlim()
    finite = [max(share, low) for share in shares if share is not None]
    heights = [place + 0.5 * ((number * 0.618) % 1.0 - 0.5) for number in range(len(finite))]
    axes.scatter(finite, heights, s=11, color=seen.colour, alpha=0.45, lw=0, clip_on=False, zorder=3)
    if finite:
        largest = min(max(finite), high)
        axes.plot(largest, place, marker=seen.marker, color=seen.colour, ms=8, mec="white", mew=0.6, zorder=4)
    if len(finite) < len(shares):
        axes.plot(high, place, marker="x", color=seen.colour, ms=8, mew=2, clip_on=False, zorder=5)


def _shares(record: Record) -> list[float | None]:
    """Each tensor's error / tolerance, inside of what is drawn; None where the error is not finite."""
    tensors = () if record.agreement is None else record.agreement.tensors()
    return [None if one.ratio is None else min(max(one.ratio, FLOOR), CEILING) for _, one in tensors]


def _unchecked(by_arm: dict[Arm, list[Record]]) -> list[str]:
    """Which implementations were not compared at some workloads, with the statuses that say why."""
    parts = []
    for arm, records in by_arm.items():
        missing = [record for record in records if record.agreement is None]
        if missing:
            statuses = ", ".join(dict.fromkeys(str(record.status) for record in missing))
            plural = "s" * (len(missing) > 1)
            parts.append(f"{style.label(arm)} at {len(missing)} workload{plural} ({statuses})")
    return [f"Not compared: {'; '.join(parts)}."] if parts else []


REPORT = style.report("agreement_plot", "error / tolerance of every compared tensor, as SVG and PNG", pictures)
