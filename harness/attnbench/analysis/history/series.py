"""A metric of one cell over the runs of one machine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from attnbench import plugins
from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.history.changes import Change, changes
from attnbench.analysis.results import Results
from attnbench.statistics.intervals import median_estimate
from attnbench.storage.records import Record, Status
from attnbench.workloads.workload import Workload

RATIO, LATENCY, ERROR_RATIO = "ratio", "latency", "error_ratio"
UNITS = {RATIO: "", LATENCY: "s", ERROR_RATIO: ""}
SMALLEST = 0.02


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
class Series:
    """A cell's values in the order of time, and where their level changed."""

    fingerprint: str
    machine: str
    workload: Workload
    implementation: str
    metric: str
    unit: str
    points: tuple[Point, ...]
    changes: tuple[Change, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to follow: a metric, the cells whose names match, and the smallest relative change that matters."""

    metric: str = RATIO
    implementations: tuple[str, ...] = ()
    workload: str = "*"
    smallest: float = SMALLEST


def follow(runs: Sequence[Results], choice: Choice) -> list[Series]:
    """The series of every cell that has the metric in some run.

    Raises:
        ValueError: no cell has it; the message lists what there is.
    """
    found: dict[tuple[str, str, str], tuple[Record, list[Point]]] = {}
    for results in runs:
        for record, point in _points(results, choice.metric):
            if not _is_chosen(record, choice) or record.environment is None:
                continue
            key = record.environment.fingerprint, record.workload.id, str(record.arm)
            found.setdefault(key, (record, []))[1].append(point)
    if not found:
        raise ValueError(
            f"no stored cell matches metric={choice.metric}, workload={choice.workload} and "
            f"implementation={','.join(choice.implementations) or 'all'}: metrics that there are: "
            f"{', '.join(_metrics(runs)) or 'none'}"
        )
    units = UNITS | {m.metric: m.unit for results in runs for r in results.records for m in r.measurements}
    return [_series(record, points, choice, units[choice.metric]) for record, points in found.values()]


def _metrics(runs: Sequence[Results]) -> list[str]:
    """Those that can be followed in some of the runs."""
    names = {*UNITS, *(m.metric for results in runs for r in results.records for m in r.measurements)}
    return sorted(name for name in names if any(True for results in runs for _ in _points(results, name)))


def _series(record: Record, points: list[Point], choice: Choice, unit: str) -> Series:
    assert record.environment is not None
    positive = all(point.value > 0 for point in points)
    return Series(
        fingerprint=record.environment.fingerprint,
        machine=record.environment.cpu,
        workload=record.workload,
        implementation=str(record.arm),
        metric=choice.metric,
        unit=unit,
        points=tuple(points),
        changes=tuple(changes([point.value for point in points], choice.smallest)) if positive else (),
    )


def _is_chosen(record: Record, choice: Choice) -> bool:
    names = {plugins.name_of(spec) for spec in choice.implementations}
    return (not names or str(record.arm) in names) and fnmatchcase(record.workload.id, choice.workload)


def _points(results: Results, metric: str) -> Iterator[tuple[Record, Point]]:
    """Each cell of a run that has the metric, with its value."""
    values = _ratios(results) if metric == RATIO else _values(results.records, metric)
    for record, (value, low, high) in values:
        at = {"run": results.run, "time": results.started.time, "commit": record.commit}
        yield record, Point(**at, value=value, low=low, high=high)


Value = tuple[float, float | None, float | None]


def _ratios(results: Results) -> Iterator[tuple[Record, Value]]:
    """None where a run compared two states of the code: each ratio is to another state."""
    if results.plan.sides is not None:
        return
    records = {record.key: record for record in results.records}
    for each in comparisons(results):
        yield records[each.key], (each.ratio, each.low, each.high)


def _values(records: Iterable[Record], metric: str) -> Iterator[tuple[Record, Value]]:
    for record in records:
        if record.status is not Status.ok:
            continue
        if metric == ERROR_RATIO:
            ratio = record.agreement.error_ratio if record.agreement is not None else None
            if ratio is not None:
                yield record, (ratio, None, None)
            continue
        found = record.measurement(metric)
        if found is not None and found.samples:
            estimate = median_estimate(found.samples)
            yield record, (estimate.point, estimate.low, estimate.high)
