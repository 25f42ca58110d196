"""Load of other programs during a run, from scripted counters."""

import pytest

from attnbench.analysis.results import read
from attnbench.analysis.sanity import SystemLoad, system_load
from attnbench.storage.events import RunFinished, VisitFinished, WorkerStarted
from attnbench.storage.journal import JOURNAL, events, write
from attnbench.storage.records import Counters
from tests import journals

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


@pytest.mark.parametrize(
    "found",
    [
        [],
        [started(at(), at()), ended(None)],
        [started(at(), at()), ended(at())],
    ],
)
def test_without_two_moments_of_a_worker_nothing_is_said(found):
    assert system_load(found, ()) is None


def test_where_some_workers_timed_something_only_they_count():
    checks = [started(at(), at()), ended(at(total_s=100))]
    times = [started(at(total_s=200), at(total_s=200)), ended(at(total_s=300, idle_s=90))]
    assert system_load([*checks, *times], ()).others == pytest.approx(0.55)
    assert system_load([*checks, *times], {2}).others == pytest.approx(0.1)
    assert system_load([*checks, *times], {0, 2}).others == pytest.approx(0.55)


def test_of_a_run_that_was_checked_first_and_timed_by_another_worker_the_load_is_that_of_the_times(tmp_path):
    busy, calm = (Counters(**(FIRST | {"total_s": 2000.0, "idle_s": idle})) for idle in (400.0, 1400.0))
    found = journals.write(tmp_path, is_finished=False)
    first, second, *visits = events(tmp_path / JOURNAL)
    checked = [first, started(at(), at()), *(each for each in visits if not isinstance(each, VisitFinished))]
    timed = [started(at(), at()), *(each for each in visits if isinstance(each, VisitFinished)), ended(calm)]
    write(tmp_path / JOURNAL, [*checked, ended(busy), *timed])
    assert found.system_load is None
    assert second.counters is None
    assert read(tmp_path).system_load.others == pytest.approx(0.0)
