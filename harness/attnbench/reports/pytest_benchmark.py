"""The report benchmark.json: times for `pytest-benchmark compare` and other tools that read its format.

Source: pytest-benchmark 5.3.1, `stats.py` and `fixture.py`, https://github.com/ionelmc/pytest-benchmark. `machine_info`
omits the host's name. Cells without a time are omitted, since the format has no place for them.
"""

import statistics
from typing import Any

from attnbench.analysis.comparisons import doubt_of
from attnbench.analysis.results import Results
from attnbench.reports import Report
from attnbench.storage.records import LATENCY, Environment, Record
from attnbench.units import readable_json, sanitize_line

VERSION = "5.3.1"


def document(results: Results) -> dict[str, Any]:
    """Return the content of benchmark.json as a dictionary.

    Raises:
        ValueError: pytest-benchmark is not installed.
    """
    try:
        from pytest_benchmark.stats import Stats
    except ImportError:
        raise ValueError("pytest-benchmark is not installed: pip install -e '.[pytest]' in the checkout") from None
    return {
        "machine_info": next(map(_machine, results.environments.values()), {"cpu": {}}),
        "commit_info": {"id": results.started.commit or "unknown", "time": results.started.time, "dirty": False},
        "benchmarks": [_benchmark(results, record, Stats()) for record in results.records if record.samples(LATENCY)],
        "datetime": results.started.time,
        "version": VERSION,
    }


def _machine(environment: Environment) -> dict[str, Any]:
    return {
        "processor": environment.cpu,
        "system": environment.system,
        "python_version": environment.python,
        "cpu": {"brand_raw": environment.cpu, "count": environment.num_logical_cores},
        "fingerprint": environment.fingerprint,
        "accelerator": environment.accelerator,
    }


def _benchmark(results: Results, record: Record, stats: Any) -> dict[str, Any]:  # noqa: ANN401 - pytest-benchmark may be missing
    """Return the entry of a cell; pytest-benchmark's `stats` computes the statistics of samples in seconds per call."""
    name, samples = sanitize_line(str(record.arm)), record.samples(LATENCY)
    judged = {"margin": results.plan.smallest_effect, "doubtful": doubt_of(results, record.key)}
    for sample in samples:
        stats.update(sample.value)
    iterations = statistics.median_low(sample.num_calls for sample in samples)
    return {
        "group": record.workload.id,
        "name": f"{name}[{record.workload.id}]",
        "fullname": f"attnbench::{name}[{record.workload.id}]",
        "params": {"implementation": name, **record.workload.axes()},
        "param": record.workload.id,
        "extra_info": {"run": record.run, "commit": record.commit or "unknown"} | judged,
        "options": {"timer": "perf_counter", "warmup": True},
        "stats": {**stats.as_dict(), "data": stats.data, "iterations": iterations},
    }


REPORT = {
    "pytest-benchmark": Report(
        summary="for `pytest-benchmark compare`, and for github-action-benchmark as its tool pytest",
        file="benchmark.json",
        text=lambda results: readable_json(document(results)) + "\n",
    )
}
