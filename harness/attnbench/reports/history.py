"""Texts about series (a metric of one cell over stored runs): a table for each machine and workload."""

from collections.abc import Iterable

from attnbench.analysis.history import Series
from attnbench.analysis.table import Row, arm_of
from attnbench.reports import titles
from attnbench.statistics.levels import FEWEST, Change
from attnbench.units import grouped, sanitize_line, show


def commit(point: Row) -> str:
    """Return the first 10 digits of a run's commit, or "unknown"."""
    return sanitize_line(point["commit"])[:10] or "unknown"


def change(series: Series, level: Change) -> str:
    """Describe a change of level: "+6.1 % from 0123abc (2026-11-02) on, before: 89ab012"."""
    at, before = series.points[level.place], series.points[level.place - 1]
    day = sanitize_line(at["time"].partition("T")[0], limit=24)
    return f"{level.effect:+.1%} from {commit(at)} ({day}) on, before: {commit(before)}".replace("%", " %")


def row(series: Series) -> dict[str, str]:
    """Return the row of a series in the table: texts by column, none of them empty."""
    few = f"- (fewer than {FEWEST} runs)" if len(series.points) < FEWEST else "none"
    return {
        "implementation": sanitize_line(str(arm_of(series.cell)), limit=24),
        "runs": str(len(series.points)),
        "first": show(series.cell["value"], series.cell["unit"]),
        "last": show(series.points[-1]["value"], series.cell["unit"]),
        "changes of level": "; ".join(change(series, level) for level in series.changes) or few,
    }


def machine_of(series: Series) -> str:
    """Describe the machine of a series by its processor and its fingerprint."""
    return f"{sanitize_line(series.cell['machine'])}, fingerprint {series.cell['fingerprint']}"


def headings(series: Iterable[Series]) -> dict[str, list[Series]]:
    """Group series by headings that name workload and machine; on each machine, workloads with changes come first."""
    return grouped(
        sorted(series, key=lambda each: (machine_of(each), not each.changes)),
        lambda each: f"{titles.title(each.cell)}, T={titles.length(each.cell)}, on {machine_of(each)}",
    )
