"""Follow a metric of each cell over stored runs, and find changes of its level.

All runs of a series have the same fingerprint (machine, versions and settings); runs with different fingerprints are
not comparable. To merge the journals of several machines, put their folders next to each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from attnbench import plugins
from attnbench.analysis.results import Results, read
from attnbench.analysis.table import CELL, Row, metric_columns, rows, runs_at, table
from attnbench.statistics.levels import Change, changes
from attnbench.statistics.verdict import Reason
from attnbench.storage.journal import journal_of
from attnbench.storage.records import LATENCY, Status

RATIO, ERROR_RATIO = "ratio", "error_ratio"
SMALLEST = 0.02  # smallest relative change of level that is reported
COLUMNS = {RATIO: "ratio", LATENCY: "latency_s", ERROR_RATIO: "error_ratio"}
"""Columns of the table that can be followed like a metric, by the names that users give for `metric`."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A cell's values over time, and the changes of their level.

    Each point is a row of its run's table with these columns added: `value` in `unit`, `machine` (the processor's
    name), and the run's `baseline` and `conditions`.
    """

    points: tuple[Row, ...]
    changes: tuple[Change, ...] = ()

    @property
    def cell(self) -> Row:
        """The first point; all points share its axes, implementation, side and fingerprint."""
        return self.points[0]


def metric_series(
    paths: Iterable[Path],
    metric: str = RATIO,
    *,
    implementations: Sequence[str] = (),
    workload: str = "*",
) -> tuple[list[Series], list[str]]:
    """Read the series of the metric for every cell, with its changes of level; also return notes on runs left out.

    The paths are run folders, journals, or folders of them. Of two copies of a run, the one with more visits (short
    series of timed blocks) counts. `implementations` (specs) and `workload` (a pattern for ids) select cells; without
    `implementations`, all are selected. Runs with other conditions than the newest run (such as cold caches) are left
    out; for the metric "ratio", also runs with another baseline. Changes below SMALLEST are not reported.

    Raises:
        ValueError: nothing can be read, or no selected cell has the metric; the message lists the available metrics.
    """
    names = {plugins.name_of(spec) for spec in implementations}
    runs: dict[tuple[str, str], tuple[int, list[Row]]] = {}
    known = set[str]()
    for journal in dict.fromkeys(journal_of(run.resolve()) for path in paths for run in runs_at(path)):
        results = read(journal)
        key, number = (results.started.time, results.run), sum(results.num_visits.values())
        if key not in runs or runs[key][0] < number:
            by_metric = _points(results)
            known |= by_metric.keys()
            runs[key] = number, by_metric.get(metric, [])
    followed = [points for _, (_, points) in sorted(runs.items()) if points]
    alike = [points for points in followed if _terms(points[0], metric) == _terms(followed[-1][0], metric)]
    series: dict[tuple[object, ...], list[Row]] = {}
    for point in (point for points in alike for point in points):
        is_chosen = not names or point["implementation"] in names
        if is_chosen and point["fingerprint"] and fnmatchcase(point["workload"], workload):
            series.setdefault(tuple(point[name] for name in ("fingerprint", *CELL)), []).append(point)
    if not series:
        raise ValueError(
            f"no stored cell matches metric={metric}, workload={workload} and "
            f"implementation={','.join(implementations) or 'all'}; available metrics: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    number = len(runs) - len(alike)
    reason = "without the metric or with doubtful times, or with another baseline or other conditions than the newest"
    return list(map(_with_changes, series.values())), [f"runs left out: {number} ({reason})"] * bool(number)


def _with_changes(points: Sequence[Row]) -> Series:
    values = [point["value"] for point in points]
    return Series(points=tuple(points), changes=tuple(changes(values, SMALLEST)))


def _terms(point: Row, metric: str) -> tuple[str, str]:
    """Return (baseline, conditions), which comparable runs share; the baseline is "" unless the metric is the ratio."""
    return point["baseline"] if metric == RATIO else "", point["conditions"]


def _points(results: Results) -> dict[str, list[Row]]:
    """Return the points of a run by metric: a row for each `ok` cell that has a value of the metric.

    Doubtful times and ratios are left out, and so are the baseline's own ratio, which is 1, and ratios between two
    states of the code, whose base varies from run to run.
    """
    columns = {column.metric: (column.name, column.unit) for column in metric_columns(results)}
    columns |= {name: (column, "s" if name == LATENCY else "") for name, column in COLUMNS.items()}
    cpus = {fingerprint: environment.cpu for fingerprint, environment in results.environments.items()}
    by_metric: dict[str, list[Row]] = {}
    for cell in rows(table(results)):
        of_run = {"baseline": results.plan.baseline, "conditions": results.plan.conditions}
        of_run["machine"] = cpus.get(cell["fingerprint"], "")
        for metric, (column, unit) in columns.items():
            is_fixed = metric == RATIO and (cell["is_baseline"] or results.plan.sides is not None)
            is_out = metric in {RATIO, LATENCY} and (cell["doubtful"] or cell["reason"] == str(Reason.doubtful))
            if cell["status"] == Status.ok and cell.get(column) is not None and not is_fixed and not is_out:
                by_metric.setdefault(metric, []).append(cell | of_run | {"value": cell[column], "unit": unit})
    return by_metric
