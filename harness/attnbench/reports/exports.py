"""Stored runs in the formats of other tools, as text: `attnbench report --format NAME`."""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from attnbench.analysis.comparisons import paired_times
from attnbench.analysis.gate.outputs import as_json
from attnbench.analysis.results import Results
from attnbench.analysis.table import arm_of, metric_columns, rows, table
from attnbench.reports.pytest_benchmark import document
from attnbench.storage.records import Key, Record, Status
from attnbench.units import plain, significant
from attnbench.workloads.flashinfer_trace import DEFINITIONS, described

PER_SECOND = 1e6
"""Microseconds per second, the unit of times for github-action-benchmark."""
NUMERICAL, FAILED, PASSED = "INCORRECT_NUMERICAL", "RUNTIME_ERROR", "PASSED"
TRACED = {Status.ok: PASSED, Status.disagrees: NUMERICAL, Status.timeout: "TIMEOUT"}
"""Statuses in a flashinfer-trace; others are FAILED, and untried cells have no evaluation."""


def traces(stored: Results) -> list[dict[str, Any]]:
    """Each tried cell as a flashinfer-trace: one for each input line, or a new one.

    Cells without a definition there are left out, as are right answers without a ratio to the baseline. Source:
    https://github.com/flashinfer-ai/flashinfer-bench, docs/flashinfer-trace/trace.mdx
    """
    times_s = paired_times(stored)
    found = next(iter(stored.environments.values()), None)
    hardware = "unknown" if found is None else found.accelerator or found.cpu
    made: list[dict[str, Any]] = []
    for record in stored.records:
        evaluation = _evaluation(record, times_s, (record.workload.id, stored.plan.reference(record.arm)))
        own = described(record.workload)
        lines = stored.plan.traced.get(record.workload.id, () if own is None else (own,))
        for line in lines if evaluation is not None else ():
            about = {"hardware": hardware, "libs": {} if found is None else dict(found.versions)}
            made.append(
                {
                    "definition": line.definition,
                    "workload": msgspec.structs.asdict(line.workload),
                    "solution": plain(str(record.arm)),
                    "evaluation": {"environment": about, "timestamp": record.time, **(evaluation or {})},
                }
            )
    return made


def _evaluation(record: Record, times_s: dict[Key, float], reference: Key) -> dict[str, Any] | None:
    """The evaluation of a cell in a trace; None if nothing was tried, or a right answer has no time."""
    if record.status in {Status.unsupported, Status.approximate} or record.is_predicted:
        return None
    status = TRACED.get(record.status, FAILED)
    correctness = performance = None
    if status in {PASSED, NUMERICAL} and record.agreement is not None:
        errors = [error for _, error in record.agreement.tensors()]
        sizes = [(each.error, abs(each.expected)) for each in errors]
        is_finite = all(error is not None for error, _ in sizes)
        relative = max((error / size for error, size in sizes if error and size), default=0.0)
        correctness = {
            "max_absolute_error": max((error or 0.0 for error, _ in sizes), default=0.0) if is_finite else "NaN",
            "max_relative_error": relative if is_finite else "NaN",
            "extra": {"note": "the relative error is that of the element with the largest absolute error"},
        }
    if status == PASSED:
        own_s, base_s = times_s.get(record.key), times_s.get(reference)
        if own_s is None or base_s is None or correctness is None:
            return None
        times = {"latency_ms": own_s * 1e3, "reference_latency_ms": base_s * 1e3}
        performance = times | {"speedup_factor": base_s / own_s}
    if status == NUMERICAL and correctness is None:
        status = FAILED
    return {"status": status, "log": record.message, "correctness": correctness, "performance": performance}


def _csv(found: list[Results]) -> str:
    import pandas as pd

    from attnbench.reports.csv import spreadsheet

    return spreadsheet(pd.concat([table(stored) for stored in found], ignore_index=True), missing="NA")


def _pytest_benchmark(found: list[Results]) -> str:
    return as_json(document(found[0]))


def series(results: Results) -> list[dict[str, object]]:
    """Medians and bytes of a run for github-action-benchmark, which draws them over time.

    All times share one unit, and all memory is in bytes, so that points stay comparable over years.

    Source: customSmallerIsBetter of https://github.com/benchmark-action/github-action-benchmark#readme.
    """
    entries: list[dict[str, object]] = []
    metrics = metric_columns(results)
    for row in rows(table(results)):
        cell = f"{arm_of(row)} on {row['workload']}"
        where = f"run {row['run']}, commit {row['commit'] or 'unknown'}"
        if row["latency_s"] is not None:
            low, high = row["latency_low_s"], row["latency_high_s"]
            half = "unknown" if low is None else f"± {significant((high - low) / 2 * PER_SECOND, 3)}"
            samples = f"median of {row['num_samples']} samples in {row['num_visits']} visits"
            time = {"unit": "us", "value": row["latency_s"] * PER_SECOND, "range": half}
            entries.append({"name": plain(f"{cell}: latency"), **time, "extra": plain(f"{where}, {samples}")})
        for metric in metrics:
            if row[metric.name] is not None:
                value = {"unit": metric.unit or "count", "value": row[metric.name], "range": "exact"}
                entries.append({"name": plain(f"{cell}: {metric.metric}"), **value, "extra": plain(where)})
    return entries


def _series(found: list[Results]) -> str:
    return as_json([each for stored in found for each in series(stored)])


def _traces(found: list[Results]) -> str:
    lines = [json.dumps(each) for stored in found for each in traces(stored)]
    if not lines:
        kinds = ", ".join(DEFINITIONS)
        raise ValueError(f"no cell that was tried has a definition of flashinfer-trace: there are {kinds}")
    return "".join(f"{line}\n" for line in lines)


WRITERS: dict[str, Callable[[list[Results]], str]] = {
    "csv": _csv,
    "pytest-benchmark": _pytest_benchmark,
    "customSmallerIsBetter": _series,
    "flashinfer-trace": _traces,
}
