"""Change points by simulation, runs by scripted journals, and their reports."""

import gzip

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from attnbench.analysis.history import metric_series
from attnbench.analysis.results import read
from attnbench.analysis.table import arm_of, table
from attnbench.cli import app
from attnbench.reports import history as history_report
from attnbench.statistics.levels import changes
from attnbench.storage.events import RunStarted
from attnbench.storage.journal import JOURNAL, PACKED
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS
from tests import journals
from tests.analysis.gate import scripts

POINTS = journals.workloads(mask=("causal",), seq_len=(128, 512))
NAMES = ("sdpa", "fused", journals.EVIL)
SLOWDOWNS = [1.0] * 5 + [1.1] * 4


def wavering(draws: np.random.Generator, number: int) -> np.ndarray:
    lone = (draws.random(number) < 0.03) * draws.uniform(0.05, 0.3, number)
    return np.exp(draws.normal(0, 0.01, number) + lone)


@pytest.mark.parametrize("number", [6, 10, 30])
def test_what_wavers_and_has_lone_outliers_changes_seldom(number):
    draws = np.random.default_rng(number)
    alarms = [bool(changes(wavering(draws, number), 0.02)) for _ in range(150)]
    assert np.mean(alarms) <= 0.08


@pytest.mark.parametrize("factor", [0.9, 1.06])
def test_a_new_level_is_found_where_it_begins(factor):
    draws = np.random.default_rng(2)
    places, effects = [], []
    for _ in range(60):
        values = np.exp(draws.normal(0, 0.01, 20))
        values[12:] *= factor
        found = changes(values, 0.02)
        places += [change.place for change in found]
        effects += [change.effect for change in found]
    assert np.mean([abs(place - 12) <= 1 for place in places]) >= 0.95
    assert len(places) >= 58
    assert np.mean(effects) == pytest.approx(factor - 1, abs=0.01)


def test_a_change_that_does_not_matter_is_none():
    draws = np.random.default_rng(3)
    values = np.exp(draws.normal(0, 0.001, 20))
    values[10:] *= 1.015
    assert [change.place for change in changes(values, 0.01)] == [10]
    assert changes(values, 0.02) == []


def test_what_never_varies_shows_any_step():
    assert changes([100.0] * 10, 0.0) == []
    (found,) = changes([100.0] * 5 + [101.0] * 5, 0.0)
    assert (found.place, found.before, found.after) == (5, pytest.approx(100.0), pytest.approx(101.0))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history") / "runs"
    for number, slowdown in enumerate(SLOWDOWNS):
        place = folder / f"2025110{number}T100000Z-example"
        when = {"time": f"2025-11-0{number + 1}T10:00:00+00:00", "commit": f"{number}abcdef0123456"}
        journals.write(place, POINTS, NAMES, slowdown=slowdown, num_visits=2, seed=number, **when)
    return folder.parent


def test_each_cell_is_a_series_in_the_order_of_time_and_the_slowdown_is_found(stored):
    series, notes = metric_series([stored])
    assert notes == []
    assert {(each.cell["workload"], str(arm_of(each.cell))) for each in series} == {
        (point.id, name) for point in POINTS for name in NAMES[1:]
    }
    for each in series:
        assert [point["time"] for point in each.points] == sorted(point["time"] for point in each.points)
        assert [change.place for change in each.changes] == [5]
        assert each.changes[0].effect == pytest.approx(0.1, abs=0.03)
        assert history_report.change(each, each.changes[0]).endswith(
            "% from 5abcdef012 (2025-11-06) on, before: 4abcdef012"
        )


def test_memory_did_not_change_and_other_metrics_can_be_followed(stored):
    for metric, unit in (("peak_memory", "bytes"), ("latency", "s"), ("error_ratio", "")):
        (each,), _ = metric_series([stored], metric, implementations=("fused",), workload="*-t512-*")
        assert each.cell["unit"] == unit
        assert len(each.points) == len(SLOWDOWNS)
        assert bool(each.changes) is (metric == "latency")


def test_a_metric_that_is_not_there_is_reported_with_those_that_are(stored):
    with pytest.raises(ValueError, match=r"metric=nothing.*error_ratio.*latency.*peak_memory.*ratio"):
        metric_series([stored], "nothing")


def test_machines_are_kept_apart(stored, tmp_path):
    other = msgspec.structs.replace(journals.ENVIRONMENT, cpu="Another CPU")
    journals.write(tmp_path / "runs" / "other", POINTS, NAMES, num_visits=1, environment=other)
    series, _ = metric_series([stored, tmp_path])
    assert {len(each.points) for each in series} == {1, len(SLOWDOWNS)}
    few = {
        history_report.machine_of(each): history_report.row(each)["changes of level"]
        for each in series
        if len(each.points) == 1
    }
    assert few == {f"Another CPU, fingerprint {other.fingerprint}": "- (fewer than 6 runs)"}


def test_the_longer_of_two_copies_counts_and_two_runs_of_one_name_both_count(stored, tmp_path):
    first = min((stored / "runs").iterdir())
    copy = tmp_path / "runs" / first.name
    copy.mkdir(parents=True)
    lines = (first / JOURNAL).read_bytes().splitlines(keepends=True)
    (copy / PACKED).write_bytes(gzip.compress(b"".join(lines[: len(lines) // 2])))
    whole = metric_series([stored])
    for paths in ([stored, tmp_path], [copy, stored], [stored, copy / PACKED]):
        assert metric_series(paths) == whole
    journals.write(tmp_path / "2" / first.name, POINTS, NAMES, num_visits=1, time="2025-12-01T00:00:00+00:00")
    assert {len(each.points) for each in metric_series([stored, tmp_path / "2"])[0]} == {len(SLOWDOWNS) + 1}


def test_the_command_prints_a_table_or_json(stored):
    done = CliRunner().invoke(app, ["history", str(stored), "--workload", "*-t512-*"])
    assert done.exit_code == 0, done.output
    assert "from 5abcdef012" in " ".join(done.output.replace("│", " ").split())
    as_json = CliRunner().invoke(app, ["history", str(stored), "--json", "-i", "fused"])
    assert [row["runs"] for row in msgspec.json.decode(as_json.stdout)] == ["9", "9"]


def test_only_ratios_to_the_same_thing_make_a_series(stored, tmp_path):
    def changed(event, **changes):
        if isinstance(event, RunStarted):
            return msgspec.structs.replace(event, plan=msgspec.structs.replace(event.plan, **changes))
        return event

    for number, other in enumerate(({"baseline": "fused"}, {"pace": "sustained"})):
        time = f"2025-10-0{number + 1}T10:00:00+00:00"
        journals.write(tmp_path / str(number), POINTS, NAMES, num_visits=1, time=time)
        scripts.rewrite(tmp_path / str(number), lambda event, other=other: changed(event, **other))
    session(tmp_path / "2")
    series, (note,) = metric_series([stored, tmp_path])
    assert {len(each.points) for each in series} == {len(SLOWDOWNS)}
    assert note.startswith("runs left out: 3 ")
    (latency,), (note,) = metric_series([stored, tmp_path], "latency", implementations=("fused",), workload="*-t512-*")
    assert len(latency.points) == len(SLOWDOWNS) + 1
    assert note.startswith("runs left out: 1 ")


OLD, NEW = "b" * 40, "c" * 40


def session(folder, *, candidate=""):
    """Write a run that compared two versions of the code; the candidate is a commit, or a folder."""
    asked = virtual.with_sides(virtual.plan(1, ("fused",), budget_s=0.0))
    base = msgspec.structs.replace(asked.sides.base, commit=OLD)
    both = msgspec.structs.replace(
        asked.sides, base=base, candidate=msgspec.structs.replace(asked.sides.candidate, commit=candidate)
    )
    client = virtual.SimulatedClient(WORLDS["calm"], lambda *_: 1e-3)
    virtual.execute(msgspec.structs.replace(asked, sides=both), folder, client)


@pytest.mark.parametrize(("candidate", "known"), [(NEW, "cccccccccc"), ("", "unknown")])
def test_a_point_of_a_side_is_of_the_commit_of_that_side(tmp_path, candidate, known):
    session(tmp_path / "runs" / "one", candidate=candidate)
    results = read(tmp_path / "runs" / "one")
    found = {str(arm_of(each.cell)): each.points[0] for each in metric_series([tmp_path], "latency")[0]}
    assert {name: history_report.commit(point) for name, point in found.items()} == {
        "fused (base)": "bbbbbbbbbb",
        "fused": known,
    }
    assert set(table(results)["commit"]) == {OLD, candidate}
