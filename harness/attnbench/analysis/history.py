"""A metric of each cell over stored runs, on each machine, with the changes of its level. Needs no torch.

A series holds the runs of one fingerprint, since only runs of one machine are comparable. To merge the journals of
several machines, put their folders next to each other.

ruptures finds change points: PELT with a penalty of 5 log(n) variances and segments of at least three runs. Before
that, isolated outliers are replaced by the median of their neighbours, so that one bad run is not a change; afterwards
a change must exceed both the noise and the smallest effect of interest.

Sources: R. Killick, P. Fearnhead and I. A. Eckley, 2012, https://doi.org/10.1080/01621459.2012.737745; C. Truong, L.
Oudre and N. Vayatis, 2020, https://doi.org/10.1016/j.sigpro.2019.107299; the filter: F. R. Hampel, 1974.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnbench import plugins
from attnbench.analysis.results import Results, read
from attnbench.analysis.table import CELL, MetricColumn, Row, metric_columns, rows, runs_at, table
from attnbench.storage.journal import journal_of
from attnbench.storage.records import LATENCY, Status

Array = NDArray[np.float64]

FEWEST = 6
"""Fewest runs of a series: fewer do not show their noise."""
SHORTEST = 3
PENALTY = 5.0
NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution, as a multiple of its median absolute deviation."""
ALONE = 3.0
"""An outlier is this many standard deviations from the median of itself and two neighbours on each side."""
LEAST_NOISE = 1e-5
"""The least noise: any change of a value that never varies counts."""
SURELY = 3.0
"""Fewest standard errors between two levels for a change to count."""

RATIO, ERROR_RATIO = "ratio", "error_ratio"
SMALLEST = 0.02
COLUMNS = {
    RATIO: ("ratio", "ratio_low", "ratio_high"),
    LATENCY: ("latency_s", "latency_low_s", "latency_high_s"),
    ERROR_RATIO: ("error_ratio", "", ""),
}
"""Columns of values and intervals that can be followed besides metrics."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The parts of a run that a history needs."""

    folder: Path
    run: str
    time: str
    baseline: str
    conditions: str
    has_sides: bool
    num_visits: int
    machines: dict[str, str]  # processor by fingerprint
    metrics: dict[str, MetricColumn]  # times excluded
    cells: list[Row]  # cells with status ok


def stored(results: Results) -> Stored:
    """Extract the parts of a run that a history needs."""
    return Stored(
        folder=results.folder,
        run=results.run,
        time=results.started.time,
        baseline=results.plan.baseline,
        conditions=results.plan.conditions,
        has_sides=results.plan.sides is not None,
        num_visits=sum(results.num_visits.values()),
        machines={name: environment.cpu for name, environment in results.environments.items()},
        metrics={column.metric: column for column in metric_columns(results)},
        cells=[row for row in rows(table(results)) if row["status"] == Status.ok],
    )


def gather(paths: Iterable[Path]) -> tuple[list[Stored], list[str]]:
    """Read all runs at the paths, sorted by time, with notes on copies; the longest copy counts.

    The paths are run folders, journals, or folders of them. A copy has the name and the time of its run.

    Raises:
        ValueError: nothing can be read.
    """
    runs: dict[tuple[str, str], Stored] = {}
    notes: list[str] = []
    for journal in dict.fromkeys(journal_of(run.resolve()) for path in paths for run in runs_at(path)):
        run = stored(read(journal))
        known = runs.setdefault((run.time, run.run), run)
        if known is not run:
            notes.append(f"{run.run} is there twice: the longer journal counts")
            runs[run.time, run.run] = max(known, run, key=lambda copy: copy.num_visits)
    return [run for _, run in sorted(runs.items(), key=lambda item: item[0])], notes


def alike(runs: Sequence[Stored], metric: str) -> tuple[list[Stored], list[str]]:
    """Keep the runs whose values are comparable to the newest run's, with a note on the others.

    A ratio depends on the baseline of its run, and a time on its conditions, such as cold caches. Ratios of runs that
    compared two states of the code are left out.
    """
    kept = [run for run in runs if metric != RATIO or not run.has_sides]
    terms = [(run.baseline if metric == RATIO else "", run.conditions) for run in kept]
    same = [run for run, its in zip(kept, terms, strict=True) if its == terms[-1]]
    number = len(runs) - len(same)
    reason = "ratios to another state of the code, or another baseline or other conditions than the newest run"
    return same, [f"runs left out: {number} ({reason})"] * bool(number)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A new level, from the value at `place` on."""

    place: int
    before: float  # the median level of the segment before
    after: float  # the median level of the segment after

    @property
    def effect(self) -> float:
        """The relative difference: 0.05 is 5 % more."""
        return self.after / self.before - 1


@dataclass(frozen=True, kw_only=True)
class Series:
    """A cell's values over time, and the changes of their level.

    Each point is a row of its run's table, with `value` in the series' unit; `low` and `high` are its 95 % interval if
    it has one.
    """

    machine: str
    metric: str
    unit: str
    points: tuple[Row, ...]
    changes: tuple[Change, ...] = ()

    @property
    def cell(self) -> Row:
        """The first point; all points share its axes, implementation, side and fingerprint."""
        return self.points[0]


def follow(
    runs: Sequence[Stored],
    metric: str = RATIO,
    *,
    implementations: Sequence[str] = (),
    workload: str = "*",
    smallest: float = SMALLEST,
) -> list[Series]:
    """The series of every cell that has the metric, with relative changes of more than `smallest`.

    Without `implementations` all are included; `workload` is a pattern for ids.

    Raises:
        ValueError: no cell has the metric; the message lists the available ones.
    """
    names = {plugins.name_of(spec) for spec in implementations}
    series: dict[tuple[object, ...], list[Row]] = {}
    for point in (point for run in runs for point in _points(run, metric)):
        is_chosen = not names or point["implementation"] in names
        if is_chosen and point["fingerprint"] and fnmatchcase(point["workload"], workload):
            series.setdefault(tuple(point[name] for name in ("fingerprint", *CELL)), []).append(point)
    units = {LATENCY: "s"} | {name: column.unit for run in runs for name, column in run.metrics.items()}
    if not series:
        known = sorted(name for name in {*COLUMNS, *units} if any(any(_points(run, name)) for run in runs))
        raise ValueError(
            f"no stored cell matches metric={metric}, workload={workload} and "
            f"implementation={','.join(implementations) or 'all'}: metrics that there are: {', '.join(known) or 'none'}"
        )
    machines = {fingerprint: cpu for run in runs for fingerprint, cpu in run.machines.items()}
    return [
        Series(
            machine=machines[points[0]["fingerprint"]],
            metric=metric,
            unit=units.get(metric, ""),
            points=tuple(points),
            changes=tuple(changes([point["value"] for point in points], smallest)),
        )
        for points in series.values()
    ]


def _points(run: Stored, metric: str) -> Iterator[Row]:
    """Each cell of a run that has the metric, with its value.

    Ratios of two sides are left out: their reference changes.
    """
    columns = COLUMNS | {name: (column.name, "", "") for name, column in run.metrics.items()}
    if metric not in columns or (metric == RATIO and run.has_sides):
        return
    value, low, high = columns[metric]
    for cell in run.cells:
        if cell.get(value) is not None and not (metric == RATIO and cell["is_baseline"]):
            yield cell | {"value": cell[value], "low": cell.get(low), "high": cell.get(high)}


def noise(logs: Array) -> float:
    """Standard deviation of successive differences, with large steps winsorized: a change of level is not noise."""
    steps = np.diff(logs)
    reach = ALONE * NORMAL_MAD * float(np.median(np.abs(steps)))
    return max(LEAST_NOISE, math.sqrt(float(np.mean(np.clip(steps, -reach, reach) ** 2)) / 2))


def among_neighbours(logs: Array) -> Array:
    """Replace each outlier by the median of its neighbourhood."""
    from scipy.ndimage import median_filter  # here, because it imports too slowly for --help

    middle = median_filter(logs, size=5, mode="nearest")
    return np.where(np.abs(logs - middle) > ALONE * noise(logs), middle, logs)


def changes(values: Sequence[float], smallest: float) -> list[Change]:
    """Changes of level by more than the share `smallest`, in order; empty if any value is not positive."""
    if len(values) < FEWEST or min(values) <= 0:
        return []
    import ruptures  # here, because it takes seconds to import

    logs = np.log(np.asarray(values, dtype=np.float64))
    smooth = among_neighbours(logs)
    spread = noise(smooth)
    search = ruptures.KernelCPD(kernel="linear", min_size=SHORTEST).fit(smooth[:, None])  # PELT, in C
    ends = [0, *map(int, search.predict(pen=PENALTY * math.log(len(logs)) * spread**2))]
    return _merged(logs, ends, spread, math.log1p(smallest))


def _merged(logs: Array, ends: list[int], spread: float, smallest: float) -> list[Change]:
    """Merge segments whose levels differ too little, the smallest difference first."""
    while len(ends) > 2:  # noqa: PLR2004 - the beginning and the end
        sizes, levels = np.diff(ends), np.array([np.median(logs[start:end]) for start, end in pairwise(ends)])
        errors = spread * np.sqrt(1 / sizes[:-1] + 1 / sizes[1:])
        steps = np.abs(np.diff(levels)) / np.maximum(smallest, SURELY * errors)
        least = int(steps.argmin())
        if steps[least] >= 1:
            return [
                Change(place=place, before=before, after=after)
                for place, (before, after) in zip(ends[1:-1], pairwise(np.exp(levels).tolist()), strict=True)
            ]
        del ends[least + 1]
    return []
