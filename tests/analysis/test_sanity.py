"""Impossible times are invalid, odd ones get a warning, and honest ones neither."""

import math
from pathlib import Path

import pytest

from attnbench.analysis.results import read
from attnbench.analysis.sanity import READING, SLACK, SystemLoad, flag_impossible_times, system_load
from attnbench.analysis.table import table
from attnbench.storage.events import RunFinished, WorkerStarted
from attnbench.storage.records import Counters, Measurement, Record, Sample, Status
from attnbench.workloads import counts
from attnbench.workloads.workload import Workload
from tests import journals, tables

MATMUL, COPY = 1e11, 1e10
LONG = Workload(seq_len=1024, direction="forward")
DECODING = Workload(seq_len=1, kv_len=65536, direction="inference")


def recorded(workload: Workload, time_s: float, name: str = "it") -> Record:
    latency = Measurement(metric="latency", unit="s", samples=(Sample(time_s),) * 3)
    place = {"run": "r", "time": "t", "commit": "c", "environment": None, "status": Status.ok}
    return Record(**place, workload=workload, implementation=name, measurements=(latency,))


def judge(*records: Record, is_cold: bool = False, **levels):
    """Return statuses, messages and warnings, in the order of the records."""
    ceilings = journals.ceilings(records[0].workload, **({"matmul": MATMUL, "copy": COPY} | levels))
    found, warnings = flag_impossible_times(records, {("", ceilings.key): ceilings}, is_cold=is_cold)
    reported = [warnings.get(record.key, ()) for record in found]
    return [record.status for record in found], [record.message for record in found], reported


def least_s(workload: Workload) -> float:
    """Return the time of its products at the ceiling."""
    return counts.least_flops(workload) / MATMUL


def test_faster_than_any_product_is_invalid_and_shows_no_number():
    honest, lying = recorded(LONG, 1.2 * least_s(LONG), "honest"), recorded(LONG, least_s(LONG) / 2.1 / SLACK, "lying")
    statuses, messages, warnings = judge(honest, lying)
    assert statuses == [Status.ok, Status.invalid]
    assert "4.20 times the fastest matrix product of this run (100 GFLOP/s)" in messages[1]
    assert warnings == [(), ()]
    ceilings = journals.ceilings(LONG, MATMUL, COPY)
    (found,), _ = flag_impossible_times([lying], {("", ceilings.key): ceilings}, is_cold=False)
    assert found.measurements == ()
    assert found.is_finding


def test_faster_than_memory_but_not_than_a_cache_has_a_warning():
    time_s = counts.least_bytes(DECODING) / COPY * 1.05
    statuses, _, (warnings,) = judge(recorded(DECODING, time_s), matmul=1e15)
    assert statuses == [Status.ok]
    assert "2.86 times the fastest copy of as many bytes" in warnings[0]
    small = Workload(seq_len=1, kv_len=64, direction="inference")
    time_s = counts.least_bytes(small) / COPY * 1.05
    assert judge(recorded(small, time_s), matmul=1e15)[2] == [()]  # it stays in a cache
    assert judge(recorded(small, time_s), matmul=1e15, is_cold=True)[2] != [()]  # but not if the cache is emptied


@pytest.mark.parametrize("shares", [0.9, 1.1, 0.9 * SLACK, 1.1 * SLACK])
def test_just_above_a_ceiling_has_a_warning_and_far_above_it_is_invalid(shares):
    (status,), _, (warnings,) = judge(recorded(LONG, least_s(LONG) / shares))
    assert status is (Status.invalid if shares > SLACK else Status.ok)
    assert bool(warnings) is (1 < shares < SLACK)


def test_ceilings_of_a_busy_machine_prove_less():
    lying = recorded(LONG, least_s(LONG) / SLACK / 2)
    assert judge(lying)[0] == [Status.invalid]
    assert judge(lying, crowding=3.0)[0] == [Status.ok]


def test_no_time_and_a_time_below_that_of_any_copy_are_invalid():
    copied_s = counts.least_bytes(DECODING) / COPY / SLACK / READING / 1.1
    assert judge(recorded(LONG, 0.0))[0] == judge(recorded(DECODING, copied_s), matmul=1e15)[0] == [Status.invalid]


def test_impossible_times_of_a_journal_show_no_speed_anywhere(tmp_path):
    """The made-up run again, on a machine whose ceilings are below its times' rates."""
    points = journals.workloads(seq_len=(512,))
    results = journals.write(tmp_path, points, ("sdpa", "fused", "naive_loop"), levels={"matmul": 5e10})
    statuses = {record.implementation: record.status for record in results.records}
    assert statuses == {"sdpa": "invalid", "fused": "invalid", "naive_loop": "ok"}
    (row,) = [row for row in tables.every(results) if row["implementation"] == "fused"]
    assert row.texts["time per call"] == row.texts["FLOP/s"] == "-"
    assert row.texts["notes"].startswith("impossible: ")
    shown = table(results).set_index("implementation")
    assert math.isnan(shown.loc["fused", "latency_s"])
    assert math.isnan(shown.loc["fused", "flops_per_s"])
    assert shown.loc["naive_loop", "flops_per_s"] == pytest.approx(
        shown.loc["naive_loop", "useful_flops"] / shown.loc["naive_loop", "latency_s"]
    )


def test_rates_and_shares_follow_from_time_counts_and_ceilings(tmp_path):
    results = journals.write(tmp_path, journals.workloads(seq_len=(512,), mask=("causal",)), ("sdpa", "fused"))
    shown = table(results).set_index("implementation")
    fused = shown.loc["fused"]
    assert fused["matmul_share"] == pytest.approx(fused["flops_per_s"] / 1.2e12)
    assert fused["executed_flops"] == pytest.approx(2 * fused["useful_flops"], rel=0.01)
    assert math.isnan(shown.loc["sdpa", "executed_flops"])
    cells = {row["implementation"]: row.texts for row in tables.every(results)}
    assert cells["sdpa"]["FLOP/s"].endswith("%)")


def test_a_journal_without_ceilings_is_read_as_before(tmp_path):
    results = journals.write(tmp_path, journals.workloads(seq_len=(512,)), ("sdpa", "fused"), levels={})
    assert results.ceilings == {}
    assert {record.status for record in results.records} == {Status.ok}
    assert all("%" not in row.texts["FLOP/s"] for row in tables.every(results))
    gallery = read(Path(__file__).parents[2] / "results" / "gallery" / "quick")
    assert len(gallery.records) > 50


FIRST = {"began_s": 7.0, "total_s": 1000.0, "idle_s": 400.0, "stolen_s": 10.0, "own_s": 5.0, "free_bytes": 900}


def at(**later):
    """Return the first counters, this much later."""
    return Counters(**{name: value + later.get(name, 0) for name, value in FIRST.items()})


def started(before, counters):
    return WorkerStarted(time="", environment=journals.ENVIRONMENT, before=before, counters=counters)


def ended(counters):
    return RunFinished(time="", elapsed_s=1.0, counters=counters)


LATER = at(total_s=100, idle_s=40, stolen_s=5, own_s=35, free_bytes=-300)


def test_what_neither_idled_nor_was_ours_nor_stolen_was_others():
    found = system_load([started(at(), at()), ended(LATER)], ())
    assert found == SystemLoad(stolen=0.05, others=pytest.approx(0.2), free_bytes=900)


def test_the_time_between_two_workers_is_left_out():
    """After a kill, the worker's orphans count neither as the run's work nor as other work."""
    second = at(total_s=200, idle_s=40, stolen_s=5, own_s=15, free_bytes=-100)
    end = at(total_s=300, idle_s=140, stolen_s=5, own_s=15)
    found = system_load([started(at(), at()), started(LATER, second), ended(end)], ())
    assert found == SystemLoad(stolen=0.025, others=pytest.approx(0.1), free_bytes=800)


@pytest.mark.parametrize("found", [[], [started(at(), at()), ended(None)], [started(at(), at()), ended(at())]])
def test_without_two_moments_of_a_worker_nothing_is_said(found):
    assert system_load(found, ()) is None


def test_where_some_workers_timed_something_only_they_count():
    checks = [started(at(), at()), ended(at(total_s=100))]
    times = [started(at(total_s=200), at(total_s=200)), ended(at(total_s=300, idle_s=90))]
    assert system_load([*checks, *times], ()).others == pytest.approx(0.55)
    assert system_load([*checks, *times], {2}).others == pytest.approx(0.1)
    assert system_load([*checks, *times], {0, 2}).others == pytest.approx(0.55)
