"""Stored runs as tables for pandas: one tidy row for each cell, or one for each raw sample.

pandas is imported inside the functions: it takes as long to import as a small run takes to read, and neither measuring
nor comparing needs it. Missing is NaN or NA, never 0.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.analysis.breakdown import allocated_bytes, num_operators, ran, timed, times
from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import Results, read
from attnbench.statistics.intervals import median, median_estimate
from attnbench.storage.journal import JOURNAL
from attnbench.storage.operator_kinds import PAGE_FAULTS
from attnbench.storage.records import Comparison, Measurement, Record, Sample
from attnbench.storage.runs import find_runs
from attnbench.workloads import counts
from attnbench.workloads.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

IDENTITY = ("run", "commit", "time", "workload", "implementation", "side", *Workload.__struct_fields__)
TIMES = ("latency_s", "latency_low_s", "latency_high_s", "num_samples", "ratio", "ratio_low", "ratio_high", "verdict")
RAN = ("ran", "num_operators", "allocated_bytes", "fault_share")
COUNTS = ("useful_flops", "executed_flops", "compulsory_bytes", "arithmetic_intensity", "score_matrix_bytes")
RATES = ("flops_per_s", "bytes_per_s", "matmul_share", "copy_share")
CELL_COLUMNS = (*IDENTITY, "status", "message", *TIMES, *RAN, *COUNTS, *RATES, "error_ratio", "fingerprint")
"""Columns of `load` that are always there; one for each metric that was measured follows them."""
SAMPLE_COLUMNS = (*IDENTITY, "metric", "unit", *Sample.__struct_fields__)
TEXTS = (
    "run",
    "commit",
    "time",
    "workload",
    "implementation",
    "side",
    "status",
    "message",
    "verdict",
    "ran",
    "fingerprint",
)


def load(*paths: Path | str) -> "pd.DataFrame":
    """Every cell of the runs at `paths`: one row each, with its axes, status, time, ratio and measured metrics.

    A path is a run's folder, its journal, or a results folder that holds runs/. Times are in seconds per call, sizes in
    bytes; `latency_low_s`, `ratio_high` and their kin bound 95 % intervals. The baseline's own ratio is 1. Rates are of
    useful FLOPs and compulsory bytes (workloads/counts.py), shares are of the ceilings that the run measured.

    Raises:
        ValueError: nothing can be read there; the message says what is wrong.
    """
    return frame(_results(paths))


def frame(runs: Iterable[Results]) -> "pd.DataFrame":
    """The same for runs already read."""
    return _frame([row for results in runs for row in _cells(results)], CELL_COLUMNS)


def samples(*paths: Path | str) -> "pd.DataFrame":
    """Every raw sample of every metric, in time order within its cell, with its place.

    Raises:
        ValueError: nothing can be read there; the message says what is wrong.
    """
    return _frame([row for results in _results(paths) for row in _samples(results)], SAMPLE_COLUMNS)


def runs_at(path: Path) -> list[Path]:
    """The runs at a path: itself, or those below it.

    Raises:
        ValueError: there is no run.
    """
    if path.is_file() or (path / JOURNAL).is_file():
        return [path]
    found = find_runs(path) or sorted(journal.parent for journal in path.glob(f"*/{JOURNAL}"))
    if not found:
        allowed = f"a run's folder, its {JOURNAL}, or a results folder that holds runs/"
        raise ValueError(f"{path} holds no run: give {allowed}")
    return found


def _results(paths: Iterable[Path | str]) -> list[Results]:
    return [read(run) for path in paths for run in runs_at(Path(path))]


def _frame(rows: list[dict[str, Any]], columns: Iterable[str]) -> "pd.DataFrame":
    """The rows under those columns and any others they have, with text columns that know NA whatever they hold."""
    import pandas as pd

    others = (column for row in rows for column in row)
    table = pd.DataFrame(rows, columns=list(dict.fromkeys([*columns, *others])))
    present = [column for column in TEXTS if column in table.columns]
    return table.astype(dict.fromkeys(present, "string"))


def _cells(results: Results) -> Iterator[dict[str, Any]]:
    compared = {each.key: each for each in comparisons(results)}
    for record in results.records:
        agreement = record.agreement
        yield {
            **_identity(record),
            "status": str(record.status),
            "message": record.message or None,
            **_latency(record),
            **_ratio(
                record,
                compared.get(record.key),
                is_baseline=results.plan.is_reference(record.arm),
            ),
            **_ran(record),
            **_counts(record),
            **_rates(record, results),
            "error_ratio": _number(None if agreement is None else agreement.error_ratio),
            "fingerprint": None if record.environment is None else record.environment.fingerprint,
            **{_column(found): found.samples[0].value for found in _single(record)},
        }


def _identity(record: Record) -> dict[str, Any]:
    named = {"run": record.run, "commit": record.commit, "time": record.time, "workload": record.workload.id}
    return {**named, "implementation": record.implementation, "side": record.side or None, **record.workload.axes()}


def _latency(record: Record) -> dict[str, Any]:
    latency = record.measurement("latency")
    found = median_estimate(latency.samples) if latency is not None and latency.samples else None
    return {
        "latency_s": _number(None if found is None else found.point),
        "latency_low_s": _number(None if found is None else found.low),
        "latency_high_s": _number(None if found is None else found.high),
        "num_samples": 0 if found is None else found.num_samples,
    }


def _counts(record: Record) -> dict[str, Any]:
    executed = record.executed_flops
    return {
        "useful_flops": counts.useful_flops(record.workload),
        "executed_flops": _number(None if executed is None else float(executed)),
        "compulsory_bytes": counts.compulsory_bytes(record.workload),
        "arithmetic_intensity": counts.arithmetic_intensity(record.workload),
        "score_matrix_bytes": counts.score_matrix_bytes(record.workload),
    }


def _rates(record: Record, results: Results) -> dict[str, Any]:
    latency = record.measurement("latency")
    if latency is None or not latency.samples:
        return dict.fromkeys(RATES, _number(None))
    found = results.rates(record.workload, median(sample.value for sample in latency.samples))
    return {name: _number(getattr(found, name)) for name in RATES}


def _ratio(record: Record, comparison: Comparison | None, *, is_baseline: bool) -> dict[str, Any]:
    own = 1.0 if is_baseline and record.measurement("latency") is not None else None
    return {
        "ratio": _number(own if comparison is None else comparison.ratio),
        "ratio_low": _number(None if comparison is None else comparison.low),
        "ratio_high": _number(None if comparison is None else comparison.high),
        "verdict": None if comparison is None else str(comparison.verdict),
    }


def _ran(record: Record) -> dict[str, Any]:
    """What ran; `fault_share` is the estimated share of page faults in the time of a call."""
    seen, latency = record.operators, record.measurement("latency")
    if seen is None:
        return {**dict.fromkeys(RAN, math.nan), "ran": None}
    call_s = median(sample.value for sample in latency.samples) if latency is not None and latency.samples else 0.0
    share = times(timed(seen, latency), call_s).get(PAGE_FAULTS, 0.0) / call_s if call_s else math.nan
    return dict(zip(RAN, (ran(seen), num_operators(seen), allocated_bytes(seen), share), strict=True))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _single(record: Record) -> list[Measurement]:
    """The metrics that are one number; time has columns of its own."""
    others = (found for found in record.measurements if not found.metric.startswith("latency"))
    return [found for found in others if len(found.samples) == 1]


def _column(measurement: Measurement) -> str:
    """The metric with its unit at the end: peak_memory in bytes is `peak_memory_bytes`."""
    unit = "".join(letter if letter.isalnum() else "_" for letter in measurement.unit.lower().replace("/", "_per_"))
    return measurement.metric if not unit or measurement.metric.endswith(f"_{unit}") else f"{measurement.metric}_{unit}"


def _samples(results: Results) -> Iterator[dict[str, Any]]:
    for record in results.records:
        identity = _identity(record)
        for measurement in record.measurements:
            named = {**identity, "metric": measurement.metric, "unit": measurement.unit}
            for sample in measurement.samples:
                yield {**named, **{field: getattr(sample, field) for field in Sample.__struct_fields__}}
