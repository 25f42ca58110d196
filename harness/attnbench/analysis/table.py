"""The table of cells, with one row for each cell (one implementation on one workload) of a run.

It is the source of every report, plot, export and history. A row has every axis of the workload, the status, the times,
every measured metric, counts, rates and the operators that ran. Within a run, no two rows share all axes,
implementation and side. A missing value is NaN or NA in the table and None in `rows`, never 0. Form of the table: H.
Wickham, Tidy Data, 2014, https://doi.org/10.18637/jss.v059.i10.

pandas is imported inside the functions: its import takes as long as reading a small run, and neither measuring nor
comparing needs it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from attnbench import plugins
from attnbench.analysis.breakdown import backend_used, num_operators
from attnbench.analysis.comparisons import Comparison, comparisons, doubt_of, paired_times, reference
from attnbench.analysis.first_calls import break_evens
from attnbench.analysis.results import Results, read
from attnbench.analysis.sanity import warnings_of
from attnbench.statistics.break_even import BreakEven
from attnbench.statistics.intervals import Estimate, median, median_estimate
from attnbench.storage.journal import JOURNAL, find_runs, has_journal
from attnbench.storage.records import LATENCY, Arm, Measurement, Record, Sample
from attnbench.storage.samples import Samples
from attnbench.units import grouped
from attnbench.workloads import counts
from attnbench.workloads.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
Row = dict[str, Any]  # a row of the table by column; None where a value is missing
AXES = Workload.__struct_fields__
LENGTHS = ("seq_len", "kv_len")
GROUP_AXES = tuple(axis for axis in AXES if axis not in LENGTHS)
"""Axes that the cells of a group share; the cells differ only in their lengths, implementation and side."""
CELL = (*AXES, "implementation", "side")  # columns that identify a row within a run

TEXT, NUMBER, NEVER_MISSING = "string", "float64", ""
"""Types of columns. Values of type TEXT or NUMBER may be missing; NEVER_MISSING ones are numbers, booleans or texts."""
IDENTITY = {
    **dict.fromkeys(("run", "commit", "time", "workload", "implementation", "side", "host"), TEXT),
    **dict.fromkeys(AXES, NEVER_MISSING),
}
CELL_COLUMNS = {
    **IDENTITY,
    **dict.fromkeys(("status", "message"), TEXT),
    **dict.fromkeys(("is_predicted", "is_baseline"), NEVER_MISSING),
    **dict.fromkeys(("latency_s", "latency_low_s", "latency_high_s"), NUMBER),
    **dict.fromkeys(("num_samples", "num_visits", "num_processes"), NEVER_MISSING),
    **dict.fromkeys(("paired_latency_s", "ratio", "ratio_low", "ratio_high"), NUMBER),
    **dict.fromkeys(("verdict", "reason", "doubtful"), TEXT),
    **dict.fromkeys(("margin", "minimum_detectable_effect"), NUMBER),
    "is_same_kernel": NEVER_MISSING,
    **dict.fromkeys(("allocator", "ran"), TEXT),
    "num_operators": NUMBER,
    "useful_flops": NEVER_MISSING,
    "executed_flops": NUMBER,
    "score_matrix_bytes": NEVER_MISSING,
    **dict.fromkeys(("flops_per_s", "matmul_share", "error_ratio"), NUMBER),
    "num_tensors": NEVER_MISSING,
    **dict.fromkeys(("diagnosis", "warnings", "fingerprint"), TEXT),
}
"""Columns that are always present, with their types. Columns of measured metrics follow.

Times are seconds of one call; `_low` and `_high` are the ends of 95 % intervals. `paired_latency_s` is the ratio times
the baseline's latency, comparable between cells of one workload. `margin` is the smallest relative difference that
matters. `reason` says why a comparison is undecided, and `doubtful` why the cell's own time is doubtful.
`is_same_kernel` says whether the baseline ran the same operators and kernels, and `allocator` how freed memory was
handled. `matmul_share` is `flops_per_s` divided by the rate of the run's fastest matrix product. `error_ratio` is the
largest error / tolerance over `num_tensors` tensors; it is missing if an error is not finite or nothing was compared.
"""
SAMPLE_COLUMNS = (*IDENTITY, "metric", "unit", *Sample.__struct_fields__)


@dataclass(frozen=True, kw_only=True)
class MetricColumn:
    """The column of a metric; smaller values are better."""

    name: str  # of the column: the metric, with its unit at the end
    metric: str
    unit: str
    explanation: str = ""  # empty if the metric is not installed

    @property
    def heading(self) -> str:
        """The metric in words: "peak memory"."""
        return self.metric.replace("_", " ")


def load(*paths: Path | str) -> "pd.DataFrame":
    """Read the runs at `paths` into a data frame with one row for each cell: axes, status, time, ratio and metrics.

    A cell is one implementation on one workload. A path is a run's folder, its journal, or a results folder that
    contains runs/. Times are in seconds per call, and sizes in bytes. Columns such as `latency_low_s` and `ratio_high`
    are the ends of 95 % intervals. The baseline's own ratio is 1. Rates are of useful FLOPs (workloads/counts.py).

    Raises:
        ValueError: nothing can be read there; the message explains why.

    >>> attnbench.table(stored)["implementation"].tolist()
    ['sdpa', 'fused']
    """
    return _frame([row for results in _results(paths) for row in _cells(results)], CELL_COLUMNS)


def samples(*paths: Path | str) -> "pd.DataFrame":
    """Read all raw samples of all metrics into a data frame, in time order within each cell.

    A row has the sample's `value` in `unit`, and where it was taken: `epoch` is the number of the process, `visit` a
    short series of blocks in that process, `block` a round in which each implementation is sampled once, and `slot` the
    position in the block. Only times are taken in blocks. Paths are as in `attnbench.table`.

    Raises:
        ValueError: nothing can be read there; the message explains why.

    >>> attnbench.samples(stored)["unit"].unique().tolist()
    ['s', 'bytes']
    """
    return _frame([row for results in _results(paths) for row in _samples(results)], SAMPLE_COLUMNS)


@lru_cache(maxsize=1)
def table(results: Results) -> "pd.DataFrame":
    """Return the table of one run, in the order of the plan. It is cached: do not modify it."""
    cells = _frame(list(_cells(results)), CELL_COLUMNS)
    twice = cells[cells.duplicated(list(CELL))]
    assert twice.empty, f"two rows of one cell: {twice[['workload', 'implementation', 'side']].to_dict('records')}"
    return cells


def rows(cells: "pd.DataFrame") -> list[Row]:
    """Return the rows of a table, or of a part of it, as dictionaries with None for missing values."""
    bare = cells.to_numpy(dtype=object, na_value=None)  # type: ignore[arg-type]
    return [dict(zip(cells.columns, row, strict=True)) for row in bare.tolist()]


def metric_columns(results: Results) -> list[MetricColumn]:
    """Return the columns of the run's metrics, without the times and without metrics whose `is_column` is false."""
    known = plugins.plugs("attnbench.metrics", "METRIC")
    measured = {one.metric: one for record in results.records for one in metrics_of(record)}
    columns = []
    for name, one in measured.items():
        if name not in known or known[name].is_column:
            explanation = known[name].summary if name in known else ""
            columns.append(MetricColumn(name=_column(one), metric=name, unit=one.unit, explanation=explanation))
    return columns


def by_length(members: Sequence[T], workload_of: Callable[[T], Workload]) -> dict[tuple[str, str], list[T]]:
    """Group cells by the length that varies and the other length: ("kv_len", "T=1"), or ("seq_len", "") if T = S.

    The varying length is kv_len if all cells have the same query length and their key lengths differ; otherwise it is
    seq_len.
    """
    workloads = [workload_of(each) for each in members]
    is_decoding = len({each.seq_len for each in workloads}) == 1 < len({each.kv_len for each in workloads})

    def place(member: T) -> tuple[str, str]:
        workload = workload_of(member)
        if is_decoding:
            return "kv_len", f"T={workload.seq_len}"
        return "seq_len", "" if workload.kv_len == workload.seq_len else f"S={workload.kv_len}"

    return grouped(members, place)


def arm_of(row: Row) -> Arm:
    """Return the arm of a row: its implementation and side."""
    return Arm(implementation=row["implementation"], side=row["side"] or "")


def runs_at(path: Path) -> list[Path]:
    """Find the runs at a path: the run itself, or all runs below the folder.

    Raises:
        ValueError: there is no run.
    """
    if path.is_file() or has_journal(path):
        return [path]
    runs = find_runs(path) or sorted(filter(has_journal, path.glob("*")))
    if not runs:
        allowed = f"a run's folder, its {JOURNAL}, or a results folder that holds runs/"
        raise ValueError(f"{path} holds no run: give {allowed}")
    return runs


def _results(paths: Iterable[Path | str]) -> list[Results]:
    return [read(run) for path in paths for run in runs_at(Path(path))]


def _frame(cells: list[Row], columns: Iterable[str]) -> "pd.DataFrame":
    """Build a table from rows, with `columns` first; columns in CELL_COLUMNS get their types even if they are empty."""
    import pandas as pd

    others = (column for row in cells for column in row)
    frame = pd.DataFrame(cells, columns=list(dict.fromkeys([*columns, *others])))
    return frame.astype({column: kind for column, kind in CELL_COLUMNS.items() if kind and column in frame.columns})


def _cells(results: Results) -> Iterator[Row]:
    compared = {comparison.key: comparison for comparison in comparisons(results)}
    times_s = paired_times(results)
    for record in results.records:
        workload, agreement, operators = record.workload, record.agreement, record.operators
        samples = record.samples(LATENCY)
        time = median_estimate(samples) if samples else None
        is_baseline = record.arm == reference(results, record.key)
        cautions = warnings_of(record, time)
        yield {
            **_identity(record),
            "status": str(record.status),
            "message": record.message or None,
            "is_predicted": record.is_predicted,
            "is_baseline": is_baseline,
            **_times(record, time, times_s.get(record.key), results),
            "ratio": 1.0 if is_baseline and samples else None,
            **_verdict(compared.get(record.key)),
            "allocator": results.plan.allocator,
            "ran": None if operators is None else backend_used(operators),
            "num_operators": None if operators is None else num_operators(operators),
            "useful_flops": counts.useful_flops(workload),
            "executed_flops": record.executed_flops,
            "score_matrix_bytes": counts.score_matrix_bytes(workload),
            "error_ratio": None if agreement is None else agreement.error_ratio,
            "num_tensors": 0 if agreement is None else len(list(agreement.tensors())),
            "diagnosis": (None if agreement is None else agreement.diagnosis) or None,
            "warnings": "; ".join([*cautions, *results.warnings.get(record.key, ())]) or None,
            "fingerprint": None if record.environment is None else record.environment.fingerprint,
            **{_column(one): median(Samples.of(one.samples).value) for one in metrics_of(record)},
            **_of_batch(record, time, results),
            **_paid(break_evens(results).get(record.key)),
        }


def _identity(record: Record) -> Row:
    run = {"run": record.run, "commit": record.commit, "time": record.time, "workload": record.workload.id}
    arm = {"implementation": record.implementation, "side": record.side or None, "host": record.host or None}
    return {**run, **arm, **record.workload.axes()}


def _times(record: Record, time: Estimate | None, paired_s: float | None, results: Results) -> Row:
    """Return the columns for a cell's time and rates; if untimed, only counts (samples, visits, processes) of 0."""
    if time is None:
        return {"num_samples": 0, "num_visits": 0, "num_processes": 0}
    flops_per_s = counts.useful_flops(record.workload) / time.point
    ceilings = results.ceilings.get((record.host, record.workload.place))
    matmul = None if ceilings is None else ceilings.matmul
    return {
        "latency_s": time.point,
        "latency_low_s": time.low,
        "latency_high_s": time.high,
        "num_samples": time.num_samples,
        "num_visits": time.num_visits,
        "num_processes": time.num_processes,
        "paired_latency_s": paired_s,
        "flops_per_s": flops_per_s,
        "matmul_share": None if matmul is None else flops_per_s / matmul.rate,
        "doubtful": doubt_of(results, record.key) or None,
    }


def _of_batch(record: Record, time: Estimate | None, results: Results) -> Row:
    """Return a batch's cache bytes per second, their share of a copy's rate, and tokens per second; {} if untimed."""
    if time is None or not record.workload.requests:
        return {}
    num_bytes = counts.cache_bytes(record.workload)
    ceilings = results.ceilings.get((record.host, record.workload.place))
    copy = None if ceilings is None else ceilings.copy(num_bytes, is_cold=results.plan.cache == "cold")
    return {
        "cache_bytes_per_s": num_bytes / time.point,
        "copy_share": None if copy is None else num_bytes / time.point / copy.rate,
        "tokens_per_s": record.workload.seq_len / time.point,
    }


def _verdict(compared: Comparison | None) -> Row:
    if compared is None:
        return {"is_same_kernel": False}
    return {
        "ratio": compared.ratio,
        "ratio_low": compared.low,
        "ratio_high": compared.high,
        "verdict": str(compared.verdict),
        "reason": None if compared.reason is None else str(compared.reason),
        "margin": compared.margin,
        "minimum_detectable_effect": compared.detectable,
        "is_same_kernel": compared.is_same_kernel,
    }


def _paid(found: BreakEven | None) -> Row:
    """Return columns with the number of calls after which a longer first call has paid off; {} if it is unknown."""
    if found is None:
        return {}
    numbers = {"paid_after_calls": found.calls, "paid_after_low": found.low, "paid_after_high": found.high}
    return {"paid": str(found.payoff), **numbers}


def metrics_of(record: Record) -> Iterator[Measurement]:
    """Return the measurements of a cell that have samples, except the latency, which has columns of its own."""
    return (one for one in record.measurements if one.metric != LATENCY and one.samples)


def _column(measurement: Measurement) -> str:
    """Return the metric's name with its unit at the end: peak_memory in bytes becomes `peak_memory_bytes`."""
    unit = "".join(letter if letter.isalnum() else "_" for letter in measurement.unit.lower().replace("/", "_per_"))
    return measurement.metric if not unit or measurement.metric.endswith(f"_{unit}") else f"{measurement.metric}_{unit}"


def _samples(results: Results) -> Iterator[Row]:
    for record in results.records:
        identity = _identity(record)
        for measurement in record.measurements:
            named = {**identity, "metric": measurement.metric, "unit": measurement.unit}
            for sample in measurement.samples:
                yield {**named, **msgspec.structs.asdict(sample)}
