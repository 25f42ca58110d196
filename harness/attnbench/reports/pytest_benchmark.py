"""Times as benchmark.json, which `pytest-benchmark compare` and tools that read its format understand.

Source: pytest-benchmark 5.3.1, `stats.py` and `fixture.py`, https://github.com/ionelmc/pytest-benchmark. The host's
name is left out of machine_info. What has no time has no place in that format and stands under `not_measured`.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnbench.analysis.results import Results
from attnbench.reports import Report
from attnbench.storage.records import LATENCY, Measurement, Record
from attnbench.units import plain

VERSION = "5.3.1"


def document(results: Results) -> dict[str, Any]:
    """The file as a dictionary."""
    timed = [(record, record.measurement(LATENCY)) for record in results.records]
    return {
        "machine_info": _machine(results),
        "commit_info": {"id": results.started.commit or "unknown", "time": results.started.time, "dirty": False},
        "benchmarks": [_benchmark(record, found) for record, found in timed if found is not None and found.samples],
        "not_measured": [_absent(record) for record, found in timed if found is None or not found.samples],
        "datetime": results.started.time,
        "version": VERSION,
    }


def _machine(results: Results) -> dict[str, Any]:
    found = next((record.environment for record in results.records if record.environment is not None), None)
    if found is None:
        return {"cpu": {}}
    cpu = {"brand_raw": found.cpu, "count": found.num_logical_cores}
    known = {"processor": found.cpu, "system": found.system, "python_version": found.python, "cpu": cpu}
    return {**known, "fingerprint": found.fingerprint, "accelerator": found.accelerator}


def _benchmark(record: Record, latency: Measurement) -> dict[str, Any]:
    name = plain(str(record.arm))
    return {
        "group": record.workload.id,
        "name": f"{name}[{record.workload.id}]",
        "fullname": f"attnbench::{name}[{record.workload.id}]",
        "params": {"implementation": name, **record.workload.axes()},
        "param": record.workload.id,
        "extra_info": {"status": str(record.status), "run": record.run, "commit": record.commit or "unknown"},
        "options": {"timer": "perf_counter", "warmup": True},
        "stats": _stats(latency),
    }


def _absent(record: Record) -> dict[str, str]:
    told = {"implementation": plain(str(record.arm)), "workload": record.workload.id}
    return {**told, "status": str(record.status), "message": plain(record.message)}


def _stats(latency: Measurement) -> dict[str, Any]:
    """Its statistics over the samples, each of which is the time of one call."""
    data = [sample.value for sample in latency.samples]
    q1, middle, q3 = (float(q) for q in np.percentile(data, (25, 50, 75)))
    mean, spread, iqr = statistics.mean(data), statistics.stdev(data) if len(data) > 1 else 0.0, q3 - q1
    by_stddev = _num_outside(data, mean - spread, mean + spread)
    by_iqr = _num_outside(data, q1 - 1.5 * iqr, q3 + 1.5 * iqr)
    return {
        "min": min(data),
        "max": max(data),
        "mean": mean,
        "stddev": spread,
        "rounds": len(data),
        "median": middle,
        "iqr": iqr,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": by_iqr,
        "stddev_outliers": by_stddev,
        "outliers": f"{by_stddev};{by_iqr}",
        "ld15iqr": min(value for value in data if value >= q1 - 1.5 * iqr),
        "hd15iqr": max(value for value in data if value <= q3 + 1.5 * iqr),
        "ops": 1.0 / mean,
        "total": sum(data),
        "data": data,
        "iterations": int(statistics.median_low(sample.num_calls for sample in latency.samples)),
    }


def _num_outside(data: Sequence[float], low: float, high: float) -> int:
    return sum(not low <= value <= high for value in data)


def write(results: Results, folder: Path) -> list[Path]:
    """Write benchmark.json."""
    path = folder / "benchmark.json"
    path.write_text(json.dumps(document(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [path]


REPORT = Report(summary="times in the format of pytest-benchmark", write=write)
