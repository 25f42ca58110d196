"""A metric of each cell over stored runs, on each machine, and where its level changed. Needs no torch.

Runs of one machine belong together: a series holds the runs of one fingerprint. Journals of several machines are merged
by putting their folders side by side.

Change points are found by ruptures: PELT with a penalty of 5 log(n) variances, segments of three runs at least. Before
that, a value that stands alone is put back among its neighbours, so that one bad run is no change; and afterwards a
change must be larger than the noise and than what matters.

Sources: R. Killick, P. Fearnhead and I. A. Eckley, 2012, https://doi.org/10.1080/01621459.2012.737745; C. Truong,
L. Oudre and N. Vayatis, 2020, https://doi.org/10.1016/j.sigpro.2019.107299; the filter: F. R. Hampel, 1974.
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
from attnbench.analysis.table import Row, arm_of, metric_columns, rows, runs_at, table, workload_of
from attnbench.statistics.intervals import NORMAL_MAD
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import LATENCY, Arm, Status
from attnbench.workloads.workload import Workload

Array = NDArray[np.float64]

FEWEST = 6
"""Runs: fewer say nothing of their noise."""
SHORTEST = 3
PENALTY = 5.0
ALONE = 3.0
"""Standard deviations from the median of itself and two neighbours on each side."""
LEAST_NOISE = 1e-5
"""What never varies has this, so that any change of it is one."""
SURELY = 3.0
"""A change must be as many standard errors of the difference of two levels."""

RATIO, ERROR_RATIO = "ratio", "error_ratio"
SMALLEST = 0.02
COLUMNS = {
    RATIO: ("ratio", "ratio_low", "ratio_high"),
    LATENCY: ("latency_s", "latency_low_s", "latency_high_s"),
    ERROR_RATIO: ("error_ratio", "", ""),
}
"""The columns with the value and its interval of what can be followed besides metrics."""


def gather(paths: Iterable[Path]) -> tuple[list[Results], list[str]]:
    """Every run at the paths in the order of time, and what was noticed on the way.

    The paths are run folders, journals, or folders of them.

    Raises:
        ValueError: nothing can be read, or two different runs have the same name.
    """
    notes: list[str] = []
    kept: dict[str, tuple[bytes, Results]] = {}
    for folder in dict.fromkeys(run.resolve() for path in paths for run in runs_at(path)):
        journal = folder if folder.is_file() else folder / JOURNAL
        results, content = read(journal), journal.read_bytes()
        other = kept.get(results.run)
        if other is not None:
            notes.append(_repeated(results, content, other))
        if other is None or len(content) > len(other[0]):
            kept[results.run] = content, results
    return sorted((each for _, each in kept.values()), key=lambda each: (each.started.time, each.run)), notes


def alike(runs: Sequence[Results], metric: str) -> tuple[list[Results], list[str]]:
    """The runs whose values mean the same as the newest's, and what is said of the others.

    A ratio is to the baseline of its run, and to a state of the code where a run compared two; a time is of warm or of
    cold caches.
    """
    kept = [run for run in runs if metric != RATIO or run.plan.sides is None]
    terms = [(run.plan.baseline if metric == RATIO else "", run.plan.cache) for run in kept]
    same = [run for run, its in zip(kept, terms, strict=True) if its == terms[-1]]
    left_out = {
        "their ratios are to another state of the code": len(runs) - len(kept),
        "the newest has another baseline or other caches than they": len(kept) - len(same),
    }
    return same, [f"runs left out, since {reason}: {number}" for reason, number in left_out.items() if number]


def _repeated(results: Results, content: bytes, other: tuple[bytes, Results]) -> str:
    """What is said of a second journal of the same run.

    Raises:
        ValueError: neither is the beginning of the other.
    """
    short, long = sorted((content, other[0]), key=len)
    if not long.startswith(short):
        where = f"{other[1].folder} and {results.folder}"
        raise ValueError(f"two different runs are called {results.run}: {where}; rename or leave out one of them")
    if short == long:
        return f"{results.run} is there twice: counted once"
    return f"{results.run} is there twice, once cut short: the longer journal counts"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run's value, with a 95 % interval where it has one."""

    run: str
    time: str
    commit: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A new level, from the value at `place` on."""

    place: int
    before: float  # the median level of the segment that ends
    after: float  # of the one that begins

    @property
    def effect(self) -> float:
        """The relative difference: 0.05 is five percent more."""
        return self.after / self.before - 1


@dataclass(frozen=True, kw_only=True)
class Series:
    """A cell's values in the order of time, and where their level changed."""

    fingerprint: str
    machine: str
    workload: Workload
    arm: Arm
    metric: str
    unit: str
    points: tuple[Point, ...]
    changes: tuple[Change, ...] = ()


def follow(
    runs: Sequence[Results],
    metric: str = RATIO,
    *,
    implementations: Sequence[str] = (),
    workload: str = "*",
    smallest: float = SMALLEST,
) -> list[Series]:
    """The series of every cell that has the metric in some run, with its changes of more than `smallest`, relatively.

    Without `implementations` all of them; `workload` is a pattern for ids.

    Raises:
        ValueError: no cell has it; the message lists what there is.
    """
    names = {plugins.name_of(spec) for spec in implementations}
    found: dict[tuple[str, Workload, Arm], list[Point]] = {}
    for results in runs:
        for row, point in _points(results, metric):
            is_chosen = not names or row["implementation"] in names
            if is_chosen and row["fingerprint"] and fnmatchcase(row["workload"], workload):
                found.setdefault((row["fingerprint"], workload_of(row), arm_of(row)), []).append(point)
    units = {each.metric: each.unit for results in runs for each in metric_columns(results)}
    if not found:
        known = sorted(name for name in {*COLUMNS, *units} if any(any(_points(results, name)) for results in runs))
        raise ValueError(
            f"no stored cell matches metric={metric}, workload={workload} and "
            f"implementation={','.join(implementations) or 'all'}: metrics that there are: {', '.join(known) or 'none'}"
        )
    environments = [record.environment for results in runs for record in results.records]
    machines = {each.fingerprint: each.cpu for each in environments if each is not None}
    return [
        Series(
            fingerprint=fingerprint,
            machine=machines[fingerprint],
            workload=followed,
            arm=arm,
            metric=metric,
            unit=units.get(metric, "s" if metric == LATENCY else ""),
            points=tuple(points),
            changes=tuple(changes([point.value for point in points], smallest)),
        )
        for (fingerprint, followed, arm), points in found.items()
    ]


def _points(results: Results, metric: str) -> Iterator[tuple[Row, Point]]:
    """Each cell of a run that has the metric, with its value; no ratios of two sides, each is to another state."""
    columns = COLUMNS | {each.metric: (each.name, "", "") for each in metric_columns(results)}
    if metric not in columns or (metric == RATIO and results.plan.sides is not None):
        return
    value, *ends = columns[metric]
    for row in rows(table(results)):
        is_compared = metric != RATIO or row["verdict"] is not None
        if row["status"] == Status.ok and row[value] is not None and is_compared:
            low, high = (row[end] if end else None for end in ends)
            at = {"run": results.run, "time": results.started.time, "commit": row["commit"]}
            yield row, Point(**at, value=row[value], low=low, high=high)


def noise(logs: Array) -> float:
    """The standard deviation from one value to the next, large steps winsorized: a change of level is not noise."""
    steps = np.diff(logs)
    reach = ALONE * NORMAL_MAD * float(np.median(np.abs(steps)))
    return max(LEAST_NOISE, math.sqrt(float(np.mean(np.clip(steps, -reach, reach) ** 2)) / 2))


def among_neighbours(logs: Array) -> Array:
    """The same, with each value that stands alone replaced by the median of those around it."""
    from scipy.ndimage import median_filter  # here, because it takes longer to import than --help may take

    middle = median_filter(logs, size=5, mode="nearest")
    return np.where(np.abs(logs - middle) > ALONE * noise(logs), middle, logs)


def changes(values: Sequence[float], smallest: float) -> list[Change]:
    """The changes of level by more than the share `smallest`, in order; none where a value is not positive."""
    if len(values) < FEWEST or min(values) <= 0:
        return []
    import ruptures  # here, because it takes seconds to import

    logs = np.log(np.asarray(values, dtype=np.float64))
    smooth = among_neighbours(logs)
    spread = noise(smooth)
    search = ruptures.Pelt(model="l2", min_size=SHORTEST, jump=1).fit(smooth[:, None])
    ends = [0, *search.predict(pen=PENALTY * math.log(len(logs)) * spread**2)]
    return _merged(logs, ends, spread, math.log1p(smallest))


def _merged(logs: Array, ends: list[int], spread: float, smallest: float) -> list[Change]:
    """The segments' borders less those across which too little happens, the smallest first."""
    while len(ends) > 2:  # noqa: PLR2004 - the beginning and the end
        segments = [logs[start:end] for start, end in pairwise(ends)]
        steps = [
            abs(float(np.median(after) - np.median(before)))
            / max(smallest, SURELY * spread * math.sqrt(1 / len(before) + 1 / len(after)))
            for before, after in pairwise(segments)
        ]
        least = min(range(len(steps)), key=steps.__getitem__)
        if steps[least] >= 1:
            levels = [math.exp(float(np.median(segment))) for segment in segments]
            return [
                Change(place=place, before=before, after=after)
                for place, (before, after) in zip(ends[1:-1], pairwise(levels), strict=True)
            ]
        del ends[least + 1]
    return []
