"""The pictures: error on identical code, power against false alarms, time to a verdict, coverage of the interval."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnbench.reports import Picture
from attnbench.reports.style import INK, SETTINGS, picture
from studies.acceptance.outcome import Outcome
from studies.acceptance.plan import ALPHA, EFFECT, FULL

OURS = "attnbench"
LOOKS = {
    OURS: {"color": "#0072B2", "marker": "o"},
    "pytest-benchmark": {"color": "#D55E00", "marker": "s"},
    "pytest-benchmark --benchmark-precision 0.02": {"color": "#E69F00", "marker": "D"},
    "torch blocked_autorange": {"color": "#009E73", "marker": "^"},
    "torch adaptive_autorange": {"color": "#56B4E9", "marker": "v"},
    "pyperf": {"color": "#CC79A7", "marker": "P"},
}
Draw = Callable[[Axes, pd.DataFrame, Sequence[Outcome]], None]


def pictures(outcomes: Sequence[Outcome]) -> dict[str, Picture]:
    """By file name; a picture whose test has no rows is left out."""
    found = {}
    for test, name, title, caption, draw in _PICTURES:
        rows = _rows(outcomes, test)
        if rows.empty:
            continue
        with mpl.rc_context(SETTINGS):
            figure = Figure(figsize=(8.6, 4.6), layout="constrained")
            axes = figure.subplots()
            draw(axes, rows, outcomes)
            short = next(each.is_short for each in outcomes if each.test == test)
            mark = " (short form: few repetitions)" if short else ""
            figure.suptitle(title + mark, x=0.01, ha="left", fontsize=12)
            found[name] = picture(figure, title, caption)
    return found


def _rows(outcomes: Sequence[Outcome], test: str) -> pd.DataFrame:
    return pd.DataFrame([row for each in outcomes if each.test == test for row in each.rows])


COMPARED_S = FULL["aa_error"].compare_s
"""Of a comparison of identical code by each tool."""
LEAST_SHOWN = 0.01
"""Per cent: what is closer to 0 by luck is drawn here."""


def look(tool: str) -> dict[str, Any]:
    """Colour and marker of a tool, the same in every picture."""
    return LOOKS.get(tool, {"color": INK, "marker": "x"})


def _log_scale(axes: Axes) -> None:
    """Plain numbers at 1, 2 and 5 times the powers of ten."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _rms(logs: "pd.Series[float]") -> float:
    return math.sqrt(float(np.mean(np.square(logs))))


def _errors(axes: Axes, rows: pd.DataFrame, _: Sequence[Outcome]) -> None:
    """A line for each statistic of each tool: a point for each cell, a bar at the RMS over all."""
    logs = rows.dropna(subset=["log"])
    groups = list(logs.groupby(["tool", "statistic"], sort=False))
    groups.sort(key=lambda group: _rms(group[1]["log"]))
    for place, ((tool, _name), each) in enumerate(groups):
        cells = each.groupby("cell")["log"].agg(_rms)
        shown = np.maximum(100 * cells, LEAST_SHOWN)
        axes.plot(shown, [place] * len(cells), linestyle="", alpha=0.6, markersize=5, **look(str(tool)))
        whole = 100 * _rms(each["log"])
        axes.plot([whole, whole], [place - 0.35, place + 0.35], color=INK, linewidth=2.5)
    axes.set_yticks(range(len(groups)), [f"{tool}, {name}" for (tool, name), _ in groups], fontsize=8)
    _log_scale(axes)
    axes.axvline(0.5, color=INK, linewidth=1, linestyle=":")
    axes.set_xlabel("RMS of the log ratio, in per cent (0.01 and less at the edge); bars: all cells")


def _power(axes: Axes, rows: pd.DataFrame, outcomes: Sequence[Outcome]) -> None:
    """For each rival the statistic that does best, over all thresholds; ours is one point, in the same wall time.

    Rivals' comparisons of identical code are those of T1, as they are and with B slowed down: T5 has few of them.
    Whoever comes later is drawn narrower, so that lines which lie on one another are all seen.
    """
    same, aa = (_rows(outcomes, test) for test in ("aa_error", "false_alarms"))
    theirs = same[same["tool"] != OURS].dropna(subset=["log"]) if len(same) else same
    tools = list(theirs.groupby("tool", sort=False)) if len(theirs) else []
    for place, (tool, found) in enumerate(tools):
        curves = [_curve(each["log"].to_numpy()) for _, each in found.groupby("statistic", sort=False)]
        alarms, power = max(curves, key=lambda curve: float(np.trapezoid(curve[1], curve[0])))
        label, width = f"{tool} (n={found['statistic'].value_counts().max()})", 1.2 * (len(tools) - place)
        axes.step(100 * alarms, 100 * power, where="post", color=look(str(tool))["color"], label=label, linewidth=width)
    own = rows[(rows["injected"] == "timer scaling") & (rows["share"] == EFFECT) & (rows["tool"] == OURS)]
    alarms_of_ours = float(aa[aa["tool"] == OURS]["is_alarm"].mean()) if len(aa) else math.nan
    share = float((own["decided_s"] <= COMPARED_S).mean()) if len(own) else math.nan
    label = f"{OURS}, watched all the time (n={len(own)})"
    axes.plot(100 * alarms_of_ours, 100 * share, linestyle="", label=label, zorder=5, **look(OURS))
    axes.axvline(100 * ALPHA, color=INK, linewidth=1, linestyle=":")
    axes.set(xlabel="false alarms on identical code, in per cent")
    axes.set(ylabel=f"slowdowns of 5 % found in {COMPARED_S:g} s, in per cent")
    axes.set(xlim=(-2, 102), ylim=(-2, 104))
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Right of the axes, where no data can be."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, fontsize=8)


def _curve(signed: Any) -> tuple[Any, Any]:  # noqa: ANN401 - an array of log ratios of identical code
    """False alarms and power at each threshold, from none to all."""
    same, slow = np.abs(signed), np.concatenate([signed, -signed]) + math.log1p(EFFECT)
    thresholds = np.concatenate([[np.inf], np.sort(np.concatenate([same, slow]))[::-1], [-np.inf]])
    alarms = np.array([(same > threshold).mean() for threshold in thresholds])
    return alarms, np.array([(slow > threshold).mean() for threshold in thresholds])


def _times(axes: Axes, rows: pd.DataFrame, _: Sequence[Outcome]) -> None:
    """Share of right verdicts against time: ours as it goes, the rivals at 5 % false alarms in each budget."""
    from studies.acceptance.power import power_of_rivals

    powers = power_of_rivals(rows)
    for tool, found in powers.groupby("tool", sort=False):
        best = found.groupby("budget_s")["power"].max()
        axes.plot(best.index, 100 * best, label=f"{tool}, best statistic", linewidth=1.4, ms=6, **look(str(tool)))
    right = np.sort(rows[(rows["tool"] == OURS) & (rows["verdict"] == "slower")]["decided_s"].to_numpy(dtype=float))
    number = int((rows["tool"] == OURS).sum())
    if len(right):
        shares = 100 * np.arange(1, len(right) + 1) / number
        longest = float(rows["budget_s"].max())
        colour = LOOKS[OURS]["color"]
        x, y = [right[0], *right, longest], [0, *shares, shares[-1]]
        axes.step(x, y, where="post", color=colour, linewidth=2.4, label=f"{OURS}, verdict slower")
    _log_scale(axes)
    axes.set(xlabel="seconds for the comparison", ylabel="right verdicts, in per cent", ylim=(-2, 104))
    _legend(axes)


def _coverage(axes: Axes, rows: pd.DataFrame, _: Sequence[Outcome]) -> None:
    """Each session's interval about its error, the misses in another colour; 0 is the reference."""
    ordered = rows.sort_values("error").reset_index(drop=True)
    for covers, colour, width in ((1.0, "#56B4E9", 1.2), (0.0, "#D55E00", 2.4)):
        each = ordered[ordered["covers"] == covers]
        low, high = 100 * (each["error"] - each["half_width"]), 100 * (each["error"] + each["half_width"])
        label = f"{'covers' if covers else 'misses'} the reference: {len(each)} of {len(ordered)}"
        axes.vlines(each.index, low, high, color=colour, linewidth=width, label=label)
    axes.plot(ordered.index, 100 * ordered["error"], color=INK, linestyle="", marker=".", markersize=2.5)
    axes.axhline(0.0, color=INK, linewidth=1)
    axes.set(xlabel="sessions, in the order of their errors", ylabel="error of the ratio, in per cent")
    _legend(axes)


_PICTURES: tuple[tuple[str, str, str, str, Draw], ...] = (
    (
        "aa_error",
        "errors",
        "The noise floor on identical code",
        "2 s for each comparison; a marker for each cell, a bar over all of them; dotted: the limit in each cell.",
        _errors,
    ),
    (
        "power",
        "power",
        "Slowdowns found against false alarms",
        f"{COMPARED_S:g} s for each comparison, timer scaling by 5 %.",
        _power,
    ),
    (
        "time_to_verdict",
        "times",
        "Time to the right verdict",
        "An operation of about a millisecond, slowed down by 5 %.",
        _times,
    ),
    (
        "coverage",
        "coverage",
        "What the 95 % interval covers",
        "Textbook attention against SDPA, sessions spread out.",
        _coverage,
    ),
)
