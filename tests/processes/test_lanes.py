"""Checks in several lanes: what is recorded does not depend on their number, and an interruption ends them all."""

import signal
import threading
from threading import Event

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.processes import execution
from attnbench.processes.messages import Failed
from attnbench.storage.events import RunStarted, now
from attnbench.storage.journal import Journal
from attnbench.storage.records import Status
from studies.simulated import virtual
from studies.simulated.worlds import World

PATIENCE_S = 60.0


class Lane(virtual.SimulatedClient):
    """Finds `bad` wrong among more than 8 keys; at 24 keys it waits until another lane has been asked about 32."""

    def __init__(self, later: Event, *, is_slow: bool = True) -> None:
        super().__init__(World(name="calm"), lambda *_: 1e-3)
        self.later, self.is_slow, self.lengths, self.num_starts = later, is_slow, list[int](), 0

    def start(self, layout: int = 0):
        self.num_starts += 1
        return super().start(layout)

    def check(self, cell, **more):
        self.lengths.append(length := cell.workload.kv_len)
        if length == 32:
            self.later.set()
        if length == 24 and self.is_slow:
            assert self.later.wait(PATIENCE_S)
        found = super().check(cell, **more)
        if cell.arm.implementation == "bad" and length > 8:
            return msgspec.structs.replace(found, status=Status.disagrees, message=f"wrong at {length}")
        return found


def checked(folder, names, lanes, *, stops, watch=lambda _: None):
    plan = virtual.plan(4, names, budget_s=0.0)  # of 8, 16, 24 and 32 keys
    with Journal(folder) as journal:
        journal.append(RunStarted(schema=execution.SCHEMA, run=folder.name, time=now(), commit="", plan=plan))
        session = execution.Session(plan, journal, lanes[0], watch, lanes=lanes[1:])
        execution.check(session, stops_when_wrong=stops)
    return [(each.implementation, each.workload.kv_len, each.status, each.message) for each in read(folder).records]


@pytest.mark.parametrize("names", [["good"], ["bad"], ["good", "bad"], ["bad", "good"]])
@pytest.mark.parametrize("stops", [False, True])
def test_what_is_recorded_does_not_depend_on_the_number_of_lanes(tmp_path, names, stops):
    alone = checked(tmp_path / "one", names, [Lane(Event(), is_slow=False)], stops=stops)
    later = Event()
    lanes = [Lane(later) for _ in range(3)]
    assert checked(tmp_path / "three", names, lanes, stops=stops) == alone
    assert len(alone) == sum(1 if stops and name == "bad" else 4 for name in names)
    assert sum(bool(each.lengths) for each in lanes) > (1 if "good" in names or not stops else 0)


def test_of_two_wrong_answers_the_first_in_order_is_told_though_it_came_later(tmp_path):
    class Worse(Lane):
        def check(self, cell, **more):
            found = super().check(cell, **more)
            is_wrong = cell.workload.kv_len in {24, 32}
            return msgspec.structs.replace(found, status=Status.disagrees, message="wrong") if is_wrong else found

    later, told = Event(), []
    lanes = [Worse(later) for _ in range(2)]
    found = checked(tmp_path / "run", ["good"], lanes, stops=True, watch=lambda shown: told.append(shown.wrong))
    assert sorted(length for lane in lanes for length in lane.lengths) == [16, 24, 32]  # 8 keys come last
    assert [length for _, length, status, _ in found if status is Status.disagrees] == [24]
    assert sum(map(bool, told)) == 1


def test_an_interruption_stops_every_lane_and_starts_none_again(tmp_path):
    is_reached = Event()

    class Hung(Lane):
        """Never answers, but ends when it is stopped."""

        is_stopped: Event | None = None

        def ask(self, function, result, /, **arguments):
            if arguments["cell"].workload.kv_len != 24:
                return super().ask(function, result, **arguments)
            self.is_stopped = Event()
            is_reached.set()
            assert self.is_stopped.wait(PATIENCE_S)
            return Failed(status=Status.crashed, message="it ended", is_lost=True)

        def stop(self):
            super().stop()
            if self.is_stopped is not None:
                self.is_stopped.set()

    def interrupt(shown):
        if "-t32-" in shown.cell:
            assert is_reached.wait(PATIENCE_S)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    lanes = [Hung(Event(), is_slow=False) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        checked(tmp_path / "run", ["good"], lanes, stops=False, watch=interrupt)
    assert not any(lane.is_running for lane in lanes)
    assert all(lane.num_starts == 1 for lane in lanes)


def test_what_cannot_be_loaded_is_tried_in_one_lane_alone(tmp_path):
    class Unloadable(Lane):
        def check(self, cell, **_):
            self.lengths.append(cell.workload.kv_len)
            return Failed(status=Status.error, message="ImportError: no such module", is_unloadable=True)

    lanes = [Unloadable(Event()) for _ in range(2)]
    found = checked(tmp_path / "run", ["good"], lanes, stops=True)
    assert sum(len(lane.lengths) for lane in lanes) == 1
    assert [message for *_, message in found].count(execution.SEE_FIRST) == 3


@pytest.mark.parametrize(
    ("workloads", "processors", "lanes"), [(60, 2, 2), (60, 8, execution.MOST_LANES), (60, 1, 1), (5, 2, 1)]
)
def test_lanes_need_processors_and_work(monkeypatch, workloads, processors, lanes):
    monkeypatch.setattr(execution.containers, "processors", lambda: processors)
    assert execution.num_lanes(virtual.plan(workloads, ["good"], budget_s=0.0)) == lanes


@pytest.mark.parametrize("change", [{"device": "cuda"}, {"seq_len": 4096}])
def test_lanes_share_no_device_and_not_much_memory(monkeypatch, change):
    monkeypatch.setattr(execution.containers, "processors", lambda: 8)
    plan = virtual.plan(60, ["good"], budget_s=0.0)
    *others, last = plan.workloads
    changed = (*others, msgspec.structs.replace(last, **change))
    assert execution.num_lanes(msgspec.structs.replace(plan, workloads=changed)) == 1
