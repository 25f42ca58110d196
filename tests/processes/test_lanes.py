"""Checks in two lanes: the records are those of one, and an interruption ends both and keeps what was found."""

import signal
import threading
import time

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.checking.rules import RULES
from attnbench.processes import execution
from attnbench.processes.messages import Failed
from attnbench.storage.events import RunStarted, now
from attnbench.storage.journal import Journal
from attnbench.storage.records import Status
from studies.simulated import virtual
from studies.simulated.worlds import World

PATIENCE_S = 60.0
BOTH = ("forward", "inference")


def planned(names, num_lengths=4):
    """Of 8, 16, 24 and 32 keys, each in training and in inference: one lane has each."""
    plan = virtual.plan(num_lengths, names, budget_s=0.0)
    workloads = [msgspec.structs.replace(each, direction=way) for each in plan.workloads for way in BOTH]
    return msgspec.structs.replace(plan, workloads=tuple(workloads))


class Lane(virtual.SimulatedClient):
    """Finds `bad` wrong at some workloads; each check takes some seconds."""

    def __init__(self, *wrong_at: tuple[str, int], takes_s: float = 0.0) -> None:
        super().__init__(World(name="calm"), lambda *_: 1e-3)
        self.wrong_at, self.takes_s, self.seen = wrong_at, takes_s, list[tuple[str, int]]()

    def check(self, cell, **more):
        self.seen.append(place := (cell.workload.direction, cell.workload.kv_len))
        time.sleep(self.takes_s)
        found = super().check(cell, **more)
        if cell.arm.implementation == "bad" and place in self.wrong_at:
            return msgspec.structs.replace(found, status=Status.disagrees, message=f"wrong at {place}")
        return found


def checked(folder, names, lanes, *, stops=True, watch=lambda _: None):
    plan = planned(names)
    with Journal(folder) as journal:
        journal.append(RunStarted(schema=execution.SCHEMA, run=folder.name, time=now(), commit="", plan=plan))
        session = execution.Session(plan, folder, journal, lanes[0], watch, second=lanes[1] if lanes[1:] else None)
        execution.check(session, stops_when_wrong=stops)
    return recorded(folder)


def recorded(folder):
    return [(each.implementation, each.workload.id, each.status, each.message) for each in read(folder).records]


@pytest.mark.parametrize("names", [["bad"], ["good", "bad"], ["bad", "good"]])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize(
    "wrong_at",
    [
        [],
        [("inference", 16)],
        [("forward", 24)],
        [("forward", 24), ("inference", 16)],
        [("forward", 24), ("inference", 24)],
        [("forward", 16), ("inference", 32)],
        [("inference", 8)],
    ],
)
def test_the_records_are_those_of_one_lane(tmp_path, names, stops, slow, wrong_at):
    alone = checked(tmp_path / "one", names, [Lane(*wrong_at)], stops=stops)
    lanes = [Lane(*wrong_at, takes_s=5e-3 * (slow == number)) for number in range(2)]
    assert checked(tmp_path / "two", names, lanes, stops=stops) == alone
    ways = [{way for way, _ in lane.seen} for lane in lanes]
    assert ways[0] == {"forward"}
    assert ways[1] <= {"inference"}


def test_each_rule_depends_on_what_divides_the_lanes():
    """So that none is tried in both, or at another workload than with one lane."""
    assert all({"scope", "direction"} <= set(each.axes) for each in RULES.values())


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_ends_both_lanes_and_keeps_what_was_found(tmp_path):
    is_reached = threading.Event()

    class Hung(Lane):
        """Never answers from 24 keys on, but ends when it is abandoned."""

        is_over = threading.Event()

        def ask(self, function, result, /, **arguments):
            if arguments["cell"].workload.kv_len < 24:
                return super().ask(function, result, **arguments)
            is_reached.set()
            assert self.is_over.wait(PATIENCE_S)
            return Failed(status=Status.crashed, message="it ended", is_lost=True)

        def abandon(self):
            self.is_over.set()

    def interrupt(shown):
        if "inference" in shown.cell and "-t32-" in shown.cell:
            assert is_reached.wait(PATIENCE_S)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    num_threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        checked(tmp_path / "run", ["good"], [Hung(), Lane()], watch=interrupt)
    assert threading.active_count() == num_threads
    ended = [workload for _, workload, status, _ in recorded(tmp_path / "run") if status is Status.ok]
    assert any("inference" in workload and "-t24-" in workload for workload in ended)  # after the hung one, in order
    assert any("forward" in workload and "-t16-" in workload for workload in ended)


@pytest.mark.parametrize("slow", [0, 1])
def test_what_cannot_be_loaded_is_tried_once_in_each_lane_and_named_with_its_first_cell(tmp_path, slow):
    class Unloadable(Lane):
        def check(self, cell, **_):
            self.seen.append((cell.arm.implementation, cell.workload.kv_len))
            time.sleep(self.takes_s)
            return Failed(status=Status.error, message="ImportError: no such module", is_unloadable=True)

    lanes = [Unloadable(takes_s=5e-2 * (slow == number)) for number in range(2)]
    found = checked(tmp_path / "run", ["one", "two"], lanes)
    assert all(len(lane.seen) <= 2 for lane in lanes)
    named = [(name, workload) for name, workload, _, message in found if message != execution.SEE_FIRST]
    first = "attention-forward-cpu-float32-b1-t16-h8-k64"  # shorter workloads come last
    assert named == [("one", first), ("two", first)]


def test_an_error_of_a_lane_ends_the_check(tmp_path):
    class Gone(Lane):
        def start(self, layout=0):
            raise ValueError("the worker process cannot start")

    with pytest.raises(ValueError, match="cannot start"):
        checked(tmp_path / "run", ["good"], [Lane(), Gone()])


@pytest.mark.parametrize(
    ("num_lengths", "processors", "change", "has_lanes"),
    [
        *((30, 2, {}, True), (30, 1, {}, False), (5, 2, {}, False), (30, 8, {"device": "cuda"}, False)),
        *((30, 8, {"seq_len": 4096}, False), (30, 8, {"scope": "module"}, True)),
    ],
)
def test_a_second_lane_needs_a_processor_and_work_but_not_much_memory(
    monkeypatch, num_lengths, processors, change, has_lanes
):
    monkeypatch.setattr(execution.containers, "processors", lambda: processors)
    plan = planned(["good"], num_lengths)
    *others, last = plan.workloads
    changed = (*others, msgspec.structs.replace(last, **change))
    assert execution.has_lanes(msgspec.structs.replace(plan, workloads=changed)) is has_lanes
