"""Series in words and tables: for a terminal, as Markdown and as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence

from attnbench.analysis.history.changes import FEWEST, Change
from attnbench.analysis.history.series import Point, Series
from attnbench.reports import words
from attnbench.reports.csv import guarded
from attnbench.reports.markdown import escaped
from attnbench.units import show

COLUMNS = ("implementation", "runs", "first", "last", "changes of level")
NAME_LEN = 24
SHORT = 10


def commit(point: Point) -> str:
    """The first digits of a commit, or that it is not known."""
    return words.plain(point.commit)[:SHORT] or "unknown"


def day(point: Point) -> str:
    """Of the run, in ISO 8601."""
    return words.plain(point.time.partition("T")[0], limit=NAME_LEN)


def change(series: Series, found: Change) -> str:
    """A change in words: "+6.1 % from 0123abc (2026-11-02) on, before: 89ab012"."""
    at, before = series.points[found.place], series.points[found.place - 1]
    return f"{found.effect:+.1%} from {commit(at)} ({day(at)}) on, before: {commit(before)}".replace("%", " %")


def row(series: Series) -> dict[str, str]:
    """A line of the table; nothing is left blank."""
    changed = "; ".join(change(series, found) for found in series.changes)
    few = f"- (fewer than {FEWEST} runs)" if len(series.points) < FEWEST else "none"
    return {
        "implementation": words.plain(series.implementation, limit=NAME_LEN),
        "runs": str(len(series.points)),
        "first": show(series.points[0].value, series.unit),
        "last": show(series.points[-1].value, series.unit),
        "changes of level": changed or few,
    }


def machines(series: Iterable[Series]) -> dict[str, list[Series]]:
    """By fingerprint."""
    found: dict[str, list[Series]] = {}
    for each in series:
        found.setdefault(each.fingerprint, []).append(each)
    return found


def panels(series: Iterable[Series]) -> dict[str, list[Series]]:
    """By machine and workload, in words; workloads on which something changed come first."""
    found: dict[str, list[Series]] = {}
    for rows in machines(series).values():
        for each in sorted(rows, key=lambda row: not row.changes):
            at = f"{words.title(each.workload)}, T={words.length(each.workload)}"
            found.setdefault(f"{at}, on {title(rows)}", []).append(each)
    return found


def title(rows: Sequence[Series]) -> str:
    """Which machine the series are of."""
    return f"{words.plain(rows[0].machine)}, fingerprint {rows[0].fingerprint}"


def markdown(series: Sequence[Series], notes: Sequence[str]) -> str:
    """A table for each workload on each machine, and what was noticed while gathering."""
    lines = [f"# {escaped(series[0].metric)} over stored runs", ""]
    for heading, rows in panels(series).items():
        lines += [f"## {escaped(heading)}", "", f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
        lines += [f"| {' | '.join(escaped(value) for value in row(each).values())} |" for each in rows]
        lines.append("")
    lines += [f"- {escaped(words.plain(note))}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


def table(series: Sequence[Series]) -> str:
    """Every point of every series as CSV, with whether a new level begins there."""
    file = io.StringIO()
    names = ["fingerprint", "workload", "implementation", "metric", "unit", "run", "time", "commit"]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*names, "value", "low", "high", "is_change"])
    for each in series:
        places = {found.place for found in each.changes}
        key = [each.fingerprint, each.workload.id, guarded(each.implementation), guarded(each.metric)]
        key.append(guarded(each.unit) or "ratio")
        for place, point in enumerate(each.points):
            at = [guarded(point.run), guarded(point.time), guarded(point.commit) or "unknown"]
            bounds = ["none" if bound is None else repr(bound) for bound in (point.low, point.high)]
            writer.writerow([*key, *at, repr(point.value), *bounds, place in places])
    return file.getvalue()
