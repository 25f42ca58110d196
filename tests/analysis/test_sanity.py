"""Impossible times are invalid, odd ones get a warning, and honest ones neither."""

import math
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.analysis.sanity import READING, SLACK, judged, warnings_of
from attnbench.analysis.table import table
from attnbench.processes import execution
from attnbench.statistics.intervals import Estimate
from attnbench.storage.events import CeilingsMeasured
from attnbench.storage.journal import JOURNAL, events
from attnbench.storage.records import Measurement, Operators, Record, Sample, Status
from attnbench.workloads import counts
from attnbench.workloads.workload import Workload
from tests import journals, tables
from tests.processes.test_run import LIARS, plan

pytestmark = pytest.mark.usefixtures("forked_workers")

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
    found, warnings = judged(records, {("", ceilings.key): ceilings}, is_cold=is_cold)
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
    (found,), _ = judged([lying], {("", ceilings.key): ceilings}, is_cold=False)
    assert found.measurements == ()
    assert found.is_finding


def test_faster_than_any_copy_is_invalid():
    time_s = counts.least_bytes(DECODING) / COPY
    statuses, messages, _ = judge(recorded(DECODING, time_s / SLACK / READING / 1.1), matmul=1e15)
    assert statuses == [Status.invalid]
    assert "times the fastest copy of this run" in messages[0]


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
    statuses, _, (warnings,) = judge(lying, crowding=3.0)
    assert statuses == [Status.ok]
    assert warnings
    assert judge(recorded(LONG, least_s(LONG) / SLACK / 4), crowding=3.0)[0] == [Status.invalid]


def test_without_ceilings_no_time_is_above_them():
    (found,), warnings = judged([recorded(LONG, 1e-9)], {}, is_cold=False)
    assert found.status is Status.ok
    assert warnings == {}


def test_a_call_that_takes_no_time_is_invalid():
    assert judge(recorded(LONG, 0.0))[:2] == ([Status.invalid], ["impossible: no time passed"])


def directed(direction: str, time_s: float) -> Record:
    return recorded(Workload(seq_len=64, direction=direction), time_s)


def test_a_pass_that_holds_another_cannot_be_far_faster_than_it():
    assert judge(directed("forward", 1.0), directed("forward_backward", 0.4))[0] == [Status.ok, Status.invalid]
    assert judge(directed("forward", 1.0), directed("forward_backward", 0.6))[0] == [Status.ok, Status.ok]


def test_a_backward_pass_far_faster_than_the_forward_pass_has_a_warning():
    statuses, _, warnings = judge(directed("forward", 1.0), directed("backward", 0.4))
    assert statuses == [Status.ok, Status.ok]
    assert warnings == [(), ("its forward pass is 2.5x slower",)]
    assert judge(directed("inference", 1.0), directed("forward_backward", 0.4))[2][1] != ()
    assert judge(directed("forward", 1.0), directed("backward", 0.6))[2] == [(), ()]


def test_a_time_that_does_not_grow_has_a_warning_only_where_it_would_have_to():
    short = Workload(seq_len=256, direction="forward")
    constant = 2 * least_s(LONG)
    assert judge(recorded(short, constant), recorded(LONG, constant))[2] == [
        (), ("takes no longer than at length 256: is all of it computed?",),
    ]  # fmt: skip
    assert judge(recorded(short, constant, "one"), recorded(LONG, constant, "another"))[2] == [(), ()]
    assert judge(recorded(short, constant / 5), recorded(LONG, constant))[2] == [(), ()]
    overhead = 20 * least_s(LONG)  # a cost common to both hides the rest
    assert judge(recorded(short, overhead), recorded(LONG, overhead))[2] == [(), ()]


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
    assert fused["copy_share"] == pytest.approx(fused["bytes_per_s"] / (8e10 / 3))
    assert fused["arithmetic_intensity"] == fused["useful_flops"] / fused["compulsory_bytes"]
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


@pytest.fixture(scope="module")
def lied(tmp_path_factory):
    """Run honest implementations, and a liar that no check detects."""
    point = Workload(seq_len=256, direction="inference", num_threads=1)
    named = (f"{LIARS}:idle", "fused", "sdpa")
    asked = plan(workloads=(point,), implementations=named, call_limit_s=10.0, metrics=("latency",))
    folder = tmp_path_factory.mktemp("run")
    execution.execute(asked, folder, lambda _: None)
    return read(folder)


@pytest.mark.long
def test_who_lies_about_its_time_alone_is_invalid_and_the_honest_are_not(lied):
    statuses = {record.implementation: record.status for record in lied.records}
    assert statuses == {"idle": Status.invalid, "fused": Status.ok, "sdpa": Status.ok}
    assert lied.warnings == {}
    assert all(record.agreement.agrees for record in lied.records)  # the liar, too


@pytest.mark.long
def test_ceilings_are_taken_once_in_a_real_run_with_raw_samples(lied):
    taken = [event for event in events(lied.folder / JOURNAL) if isinstance(event, CeilingsMeasured)]
    (found,) = [event.ceilings for event in taken]
    assert found.key == ("cpu", "float32", 1)
    assert found.message == ""
    assert len({sample.round for sample in found.samples}) >= 3
    assert found.matmul.rate > 1e8
    assert found.copy(0).rate >= found.copy(math.inf).rate > 1e7


def test_copies_inside_the_timed_call_are_said_beside_its_time():
    copying = recorded(LONG, least_s(LONG) * 2)
    seen = Operators(calls=(), copies="keys are repeated")
    time = Estimate(point=1.0, standard_error=None, num_processes=9, num_visits=9, num_samples=99)
    said = warnings_of(msgspec.structs.replace(copying, operators=seen), time)
    assert "its time includes copies: keys are repeated" in list(said)
