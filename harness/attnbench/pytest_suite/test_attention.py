"""One test for each cell of the sweep."""

from typing import Any

import pytest

from attnbench.pytest_suite.replay import Cell, Measured, ReplayClock
from attnbench.storage.records import Status

CLOCK = ReplayClock()


@pytest.mark.benchmark(timer=CLOCK)
def test_attention(benchmark: Any, measured: Measured, cell: Cell) -> None:  # noqa: ANN401 - pytest-benchmark has no types
    """The cell was checked and timed; its samples become the test's rounds."""
    record = measured.record(cell)
    latency = record.measurement("latency")
    if record.status is Status.unsupported or record.is_predicted:
        pytest.skip(f"{record.status}: {record.message}")
    assert record.status is Status.ok, f"{record.status}: {record.message}"
    assert latency is not None, "it was not timed"
    samples = [sample.value for sample in latency.samples]
    CLOCK.load(samples)
    benchmark.group = cell.workload.id
    benchmark.extra_info.update(measured.extra_info(cell))
    benchmark.pedantic(CLOCK.play, rounds=len(samples), iterations=1)
