"""Verdicts: intervals against 1 and the margin, and the selection of compared cells."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import pytest

from attnbench.analysis import comparisons as compared
from attnbench.analysis.comparisons import Comparison, comparisons, doubts, paired_times, runs_the_same, too_noisy
from attnbench.analysis.results import Results
from attnbench.reports import summary
from attnbench.statistics.intervals import median
from attnbench.storage.records import LATENCY, Arm
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS
from tests import journals, tables

POINTS = journals.workloads(mask=("none", "causal"), seq_len=(128, 2048))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return journals.write(tmp_path_factory.mktemp("run"), POINTS)


def named(results: Results, name: str) -> list[Comparison]:
    return [found for found in comparisons(results) if found.implementation == name]


def test_ok_cells_but_the_baseline_are_compared_and_no_others(results: Results) -> None:
    timed = {
        (record.workload.id, record.implementation)
        for record in results.records
        if record.status == "ok" and record.implementation != journals.BASELINE
    }
    assert {(found.workload.id, found.implementation) for found in comparisons(results)} == timed


def test_without_a_time_of_the_baseline_the_first_with_a_time_takes_its_place(tmp_path: Path) -> None:
    run = journals.write(tmp_path, POINTS, ("fused", "einsum"))
    assert {(found.baseline, found.implementation) for found in comparisons(run)} == {("fused", "einsum")}
    assert {row["implementation"]: row["is_baseline"] for row in tables.every(run)} == {"fused": True, "einsum": False}


def test_the_time_of_a_cell_is_its_ratio_times_the_time_of_its_baseline(results: Results) -> None:
    times_s = paired_times(results)
    timed = {each.key: each.samples(LATENCY) for each in results.records if each.samples(LATENCY)}
    own_s = {key: median(sample.value for sample in samples) for key, samples in timed.items()}
    for each in comparisons(results):
        workload, _ = each.key
        baseline = workload, Arm(implementation=each.baseline)
        assert times_s[baseline] == pytest.approx(own_s[baseline])
        assert times_s[each.key] == pytest.approx(each.ratio * own_s[baseline])


def test_the_same_operators_as_the_baselines_are_told(results: Results) -> None:
    """In the journals, `sdpa_flash` runs the operators of `sdpa`, and `fused` does not."""
    assert {each.is_same_kernel for each in named(results, "sdpa_flash")} == {True}
    assert {each.is_same_kernel for each in named(results, "fused")} == {False}
    seen = next(record.operators for record in results.records if record.operators is not None)
    assert runs_the_same(seen, seen)
    assert not runs_the_same(seen, None)
    assert not runs_the_same(None, None)


def test_noise_above_the_margin_is_a_warning_and_changes_no_margin(results: Results, tmp_path: Path) -> None:
    assert too_noisy(results) is None
    client = virtual.SimulatedClient(WORLDS["calm"], lambda *_: 2e-3, seed=1, layout=0.05)
    noisy = virtual.execute(virtual.plan(1, ("baseline", "same"), budget_s=0.0), tmp_path, client)
    assert "too noisy" in too_noisy(noisy)
    assert {each.margin for each in comparisons(noisy)} == {noisy.plan.smallest_effect}


def test_discarded_blocks_have_no_say(results: Results) -> None:
    workload = POINTS[0].id
    lost = frozenset((epoch, epoch, block) for epoch in range(8, 16) for block in range(4))
    disturbed = dataclasses.replace(results, discarded={workload: lost})
    (found,) = [each for each in comparisons(disturbed) if _is(each, workload, "fused")]
    (whole,) = [each for each in comparisons(results) if _is(each, workload, "fused")]
    assert found.ratio != whole.ratio
    assert (found.effect.num_processes, whole.effect.num_processes) == (8, 16)


def _is(found: Comparison, workload: str, name: str) -> bool:
    return (found.workload.id, found.implementation) == (workload, name)


@pytest.mark.usefixtures("many_visits")
def test_a_run_ends_by_saying_what_is_open_and_what_would_show(tmp_path: Path) -> None:
    truth = {"baseline": 1.0, "near": 1.0, "slow": 1.5}
    client = virtual.SimulatedClient(WORLDS["bimodal"], lambda _, name: 2e-3 * truth[name], seed=2, layout=0.03)
    found = virtual.execute(virtual.plan(1, tuple(truth), budget_s=1.0), tmp_path, client)
    assert summary.decided(found) == "1 of 2 comparisons decided"
    cells = {row["implementation"]: row.texts["verdict"] for row in tables.every(found)}
    assert re.fullmatch(r"undecided \(\d+(\.\d+)? % would show\), same kernel", cells["near"]), cells


@pytest.mark.parametrize(("num_threads", "end"), [(0, "try --set num_threads=1."), (1, "try a quieter machine.")])
def test_threads_that_waited_name_one_thread_as_the_way_out(num_threads, end, tmp_path, monkeypatch):
    found = journals.write(tmp_path, journals.workloads(num_threads=(num_threads,)), ("sdpa", "fused"))
    monkeypatch.setattr(compared, "waiting", lambda results: dict.fromkeys([each.key for each in results.records], 0.6))
    monkeypatch.setattr(compared, "MOST_WAITING", 0.25)
    assert doubts(found)[0].endswith(end)


def test_a_doubt_is_said_before_any_verdict_once_for_each_implementation(tmp_path):
    points = journals.workloads(seq_len=(256, 512))
    results = journals.write(tmp_path / "run", points, ("fused", "sdpa"), num_epochs=1, num_visits=1)
    doubtful = replace(results, throttled={point.id: 0x8 for point in points})
    lines = [each for each in doubts(doubtful) if "throttled" in each]
    assert [next(name for name in ("fused", "sdpa") if name in line) for line in lines] == ["fused", "sdpa"]
    assert set(lines) <= set(summary.troubles(doubtful))
    assert not any("throttled" in each for each in doubts(results))
