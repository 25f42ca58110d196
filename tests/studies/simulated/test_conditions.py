"""Conditions of a sample on a simulated machine: cold caches, page faults, load; and the journal, byte for byte."""

import re
from itertools import pairwise

import msgspec
import pytest

from attnbench.reports import story
from attnbench.reports.story import facts, troubles
from attnbench.statistics.intervals import median
from attnbench.storage.events import SUSTAINED_S, VisitFinished
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import DeviceState
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient, plan
from studies.simulated.worlds import WORLDS
from tests import tables
from tests.analysis.gate.scripts import rewrite

pytestmark = pytest.mark.usefixtures("many_visits")

SHORT_S = 0.3e-3
ASKED = plan(2, ("baseline", "same"), budget_s=20.0)


def samples(results, name="same"):
    return [
        sample
        for record in results.records
        if record.implementation == name
        for measurement in record.measurements
        if measurement.metric == "latency"
        for sample in measurement.samples
    ]


def run_in(world, folder, asked=ASKED, **settings):
    return virtual.execute(asked, folder, SimulatedClient(WORLDS[world], lambda *_: SHORT_S, **settings))


def test_cold_caches_cost_each_call_what_the_world_says(tmp_path):
    """The time excludes emptying them, and short calls have a bounded number per sample."""
    warm = samples(run_in("slots", tmp_path / "warm"))
    cold = samples(run_in("slots", tmp_path / "cold", msgspec.structs.replace(ASKED, cache="cold")))
    ratio = median(each.value for each in cold) / median(each.value for each in warm)
    assert ratio == pytest.approx(1 + WORLDS["slots"].carry, rel=0.02)
    assert {each.num_calls for each in cold} == {4}


class Asked(SimulatedClient):
    """Records its sample requests."""

    def sample_blocks(self, visit):
        self.visits = [*getattr(self, "visits", []), visit]
        return super().sample_blocks(visit)


def test_a_sustained_visit_begins_hot_and_the_report_says_so(tmp_path):
    found = {}
    for pace in ("burst", "sustained"):
        client = Asked(WORLDS["calm"], lambda *_: 3e-3)
        asked = msgspec.structs.replace(ASKED, pace=pace, launch="graph", budget_s=0.0)
        results = virtual.execute(asked, tmp_path / pace, client)
        assert facts(results)["samples"].endswith(
            "caches warm, CUDA graphs" + (", sustained" if pace == "sustained" else "")
        )
        assert {each.launch for each in client.visits} == {"graph"}
        assert {each.sustained_s for each in client.visits} == {SUSTAINED_S if pace == "sustained" else 0.0}
        found[pace] = samples(results)
    starts = sorted({each.visit: each.start_s for each in reversed(found["sustained"])}.values())
    assert starts[0] >= SUSTAINED_S > found["burst"][0].start_s
    assert min(later - earlier for earlier, later in pairwise(starts)) >= SUSTAINED_S


@pytest.mark.parametrize(("slowed_by", "why"), [(0x4 | 0x1, "power cap"), (0x4 | 0x20, "power cap, thermal slowdown")])
def test_the_first_lines_say_what_throttled_the_device(slowed_by, why, tmp_path):
    results = run_in("calm", tmp_path)
    first = results.plan.workloads[0].id
    assert not any("throttled" in line for line in troubles(results))
    states = (
        DeviceState(clock_mhz=1980.0, temperature_c=50.0, power_w=640.0),
        DeviceState(clock_mhz=1700.0, temperature_c=61.0, power_w=700.0, slowed_by=slowed_by),
        DeviceState(clock_mhz=0.0, temperature_c=0.0, power_w=660.0, slowed_by=0x1),  # idle, and no more known
    )

    def stated(event):
        is_there = isinstance(event, VisitFinished) and event.workload == first
        return msgspec.structs.replace(event, states=states) if is_there else event

    found = rewrite(tmp_path, stated)
    notes = {row["workload"]: row.texts["notes"] for row in tables.every(found)}
    assert {workload for workload, text in notes.items() if "clock fell" in text} == {first}
    assert why.split(", ")[0] in notes[first]
    if why == "power cap":  # a GPU under full load is at its power cap
        assert not any("throttled" in line for line in troubles(found))
        return
    assert any(f"{first} is doubtful: the driver throttled the device" in line for line in troubles(found))
    summary = story.summary(found)
    assert summary.index("throttled") < summary.index("## Findings")


def test_page_faults_are_counted_call_by_call_and_reported(tmp_path):
    results = run_in("calm", tmp_path, faults=lambda _, name: 900 if name == "same" else 0)
    assert {each.num_faults / each.num_calls for each in samples(results)} == {900}
    assert {each.num_faults for each in samples(results, "baseline")} == {0}
    notes = {row["implementation"]: row.texts["notes"] for row in tables.every(results)}
    assert "900 page faults" in notes["same"]
    assert "page fault" not in notes["baseline"]


def test_the_same_seed_writes_the_same_journal(tmp_path):
    journals = []
    for name in ("one", "other"):
        run_in("busy", tmp_path / name, layout=0.01, process=0.01, seed=3)
        lines = (tmp_path / name / JOURNAL).read_text().splitlines()
        journals.append([re.sub(r'"(time|run|commit|digest)":"[^"]*"', "", line) for line in lines])
    assert len(journals[0]) > 10
    assert journals[0] == journals[1]
