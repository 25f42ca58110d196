"""One test for each cell of the sweep."""

from typing import Any

import pytest

from attnbench.analysis.results import Results
from attnbench.analysis.table import metric_columns, rows, table
from attnbench.plugins import name_of
from attnbench.pytest_suite.conftest import Cell, ReplayClock
from attnbench.storage.records import LATENCY, Status

CLOCK = ReplayClock()
COMPARED = ("ratio", "ratio_low", "ratio_high", "verdict", "minimum_detectable_effect")


@pytest.mark.benchmark(timer=CLOCK)
def test_attention(benchmark: Any, measured: Results, cell: Cell) -> None:  # noqa: ANN401 - pytest-benchmark has no types
    """The cell was checked and timed; its samples become the test's rounds, its verdict and metrics the extra info."""
    key = cell.workload.id, name_of(cell.spec)
    record = next(each for each in measured.records if (each.workload.id, each.implementation) == key)
    latency = record.measurement(LATENCY)
    if record.status in {Status.unsupported, Status.approximate} or record.is_predicted:
        pytest.skip(f"{record.status}: {record.message}")
    assert record.status is Status.ok, f"{record.status}: {record.message}"
    assert latency is not None, "it was not timed"
    samples = [sample.value for sample in latency.samples]
    CLOCK.load(samples)
    row = next(each for each in rows(table(measured)) if (each["workload"], each["implementation"]) == key)
    benchmark.group = cell.workload.id
    benchmark.extra_info.update(run=row["run"], status=row["status"])
    if row["verdict"] is not None:
        benchmark.extra_info.update({"baseline": measured.plan.baseline} | {name: row[name] for name in COMPARED})
    metrics = {each.name: row[each.name] for each in metric_columns(measured)}
    benchmark.extra_info.update({name: value for name, value in metrics.items() if value is not None})
    benchmark.pedantic(CLOCK.play, rounds=len(samples), iterations=1)
