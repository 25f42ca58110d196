"""Failures during a run: the blamed cell, the cost, and the run's end."""

import msgspec
import pytest
import torch

from attnbench.analysis.results import read
from attnbench.devices import waiting
from attnbench.processes.messages import (
    Check,
    Done,
    Failed,
    Heartbeat,
    Observe,
    Prepare,
    SampleBlocks,
    enveloped,
)
from attnbench.processes.worker import answers
from attnbench.processes.worker.answers import Worker
from attnbench.processes.worker_client import ProcessClient, Template
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import place_of
from attnbench.storage.events import CellChecked, CellMeasured
from attnbench.storage.journal import Journal
from attnbench.storage.records import PROBE, Arm, Sample, Status
from attnbench.timing.schedule import DECIDED, NOTHING, SPENT
from attnbench.workloads.workload import Workload
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient
from studies.simulated.worlds import WORLDS
from tests.checks import checked

SMALL = Workload(seq_len=4, num_heads=2, head_dim=4)
FUSED = Arm(implementation="fused")


def client(kind: type[SimulatedClient] = SimulatedClient) -> SimulatedClient:
    return kind(WORLDS["calm"], lambda _, name: 2e-3 if name == "slow" else 1e-3, seed=1)


@pytest.mark.parametrize(("names", "reason"), [(("baseline",), NOTHING), (("baseline", "slow"), DECIDED)])
def test_a_run_with_nothing_to_compare_comes_to_its_end(tmp_path, names, reason):
    results = virtual.execute(virtual.plan(2, names, budget_s=30.0), tmp_path / "run", client())
    assert results.reason == reason
    assert results.elapsed_s is not None
    assert {record.status for record in results.records} == {Status.ok}


def test_where_every_block_is_discarded_the_budget_is_spent_and_nothing_is_said(tmp_path, monkeypatch):
    def add(self, workload, probes, _kind):
        for sample in probes:
            self.num_blocks += 1
            self.discarded.setdefault(workload, set()).add(place_of(sample))

    monkeypatch.setattr(InterferenceGauge, "add", add)
    results = virtual.execute(virtual.plan(1, ("baseline", "slow"), budget_s=10.0), tmp_path / "run", client())
    assert results.reason == SPENT
    assert results.elapsed_s >= 10.0


class NoRoom(SimulatedClient):
    """One workload does not fit into memory with its inputs."""

    def ask(self, request):
        if isinstance(request, SampleBlocks) and request.workload.seq_len == 8:
            return Failed(arm=PROBE, status=Status.out_of_memory, message="no room")
        return super().ask(request)


def test_what_the_harness_itself_cannot_do_costs_the_workload_and_blames_nobody(tmp_path):
    results = virtual.execute(virtual.plan(2, ("baseline", "slow"), budget_s=10.0), tmp_path / "run", client(NoRoom))
    lost = {record.implementation: record for record in results.records if record.workload.seq_len == 8}
    assert lost.keys() == {"baseline", "slow"}
    assert {(each.status, each.message) for each in lost.values()} == {
        (Status.out_of_memory, "while the harness prepared or read the workload: no room")
    }
    assert all(record.status is Status.ok for record in results.records if record.workload.seq_len != 8)


class Crowded(SimulatedClient):
    """Every request fails for lack of memory in all but a fresh process."""

    is_fresh = False

    def start(self, layout=0):
        self.is_fresh = True
        return super().start(layout)

    def ask(self, request):
        if not self.is_fresh:
            return Failed(arm=PROBE, status=Status.out_of_memory, message="no room")
        self.is_fresh = False
        return super().ask(request)


def test_a_process_that_is_full_is_replaced_and_costs_nobody_a_time(tmp_path):
    results = virtual.execute(virtual.plan(2, ("baseline", "slow"), budget_s=10.0), tmp_path / "run", client(Crowded))
    assert {record.status for record in results.records} == {Status.ok}


class Unloadable(SimulatedClient):
    """One implementation cannot be imported, and the attempt takes a minute."""

    num_imports = 0

    def ask(self, request):
        if isinstance(request, Check) and request.arm.implementation == "slow":
            self.num_imports += 1
            return Failed(status=Status.error, message="ImportError: no such module", is_unloadable=True)
        return super().ask(request)


def test_what_cannot_be_loaded_is_tried_once_and_named_once(tmp_path):
    worker = client(Unloadable)
    results = virtual.execute(virtual.plan(5, ("baseline", "slow"), budget_s=10.0), tmp_path / "run", worker)
    records = [record for record in results.records if record.implementation == "slow"]
    assert worker.num_imports == 1
    assert len(records) == 5
    assert [record.message for record in records if record.is_finding] == ["ImportError: no such module"]
    assert sum(record.is_predicted for record in records) == 4


class Elsewhere(SimulatedClient):
    """The third process has another version of torch."""

    def start(self, layout=0):
        ready = super().start(layout)
        moved = msgspec.structs.replace(ready.environment, versions={**ready.environment.versions, "torch": "9.9"})
        return ready if layout <= 1 else msgspec.structs.replace(ready, environment=moved)


def test_a_run_ends_where_its_environment_changes_under_it(tmp_path):
    asked = virtual.plan(2, ("baseline", "slow"), budget_s=30.0)
    with pytest.raises(ValueError, match="began in another environment"):
        virtual.execute(asked, tmp_path / "run", client(Elsewhere))
    kept = read(tmp_path / "run")
    assert kept.elapsed_s is None
    assert sum(kept.num_visits.values()) == 2  # the first round
    assert virtual.execute(asked, tmp_path / "run", client()).elapsed_s is not None  # it left no lock behind


def test_inputs_that_find_no_room_are_the_harness_own_failure(tmp_path, monkeypatch):
    worker = Worker(Heartbeat())

    def bench(_):
        raise MemoryError("no room")

    monkeypatch.setattr(worker, "bench", bench)
    arms = ((FUSED, "fused"), (PROBE, ""), (Arm(implementation="sdpa"), "sdpa"))
    failed = worker.answer(SampleBlocks(workload=SMALL, arms=arms, epoch=0, number=0, num_blocks=1, seed=0))
    assert (failed.arm, failed.status) == (PROBE, Status.out_of_memory)


@pytest.mark.parametrize("spec", ["fused", "no such file.py:mine"])
def test_a_worker_whose_turn_ends_lets_its_threads_sleep_whatever_came_of_it(tmp_path, monkeypatch, spec):
    worker, turns = Worker(Heartbeat()), []
    monkeypatch.setattr(waiting, "settle", lambda: turns.append(spec))
    asked = SampleBlocks(
        workload=SMALL, arms=((Arm(implementation="x"), spec), (PROBE, "")), epoch=0, number=0, num_blocks=1, seed=0
    )
    worker.answer(asked)
    assert turns == []
    worker.answer(msgspec.structs.replace(asked, settles=True))
    assert turns == [spec]


RUDE = """
import torch

def rude(query, key, value, *, mask=None):
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    raise RuntimeError("and good night")
"""


@pytest.mark.parametrize("is_check", [True, False])
def test_who_changes_the_process_and_then_fails_leaves_it_as_it_was(tmp_path, is_check):
    (tmp_path / "rude.py").write_text(RUDE)
    cell = {"workload": SMALL, "arm": FUSED, "spec": f"{tmp_path / 'rude.py'}:rude"}
    runner = Worker(Heartbeat())
    if is_check:
        reply = checked(Check(**cell, call_limit_s=5.0, memory_limit_bytes=2**30, seed=0), runner)
    else:
        reply = runner.answer(Observe(**cell, metric="peak_memory"))
    assert reply.status is Status.error
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(("is_broken", "status", "ends"), [(True, "error", True), (False, "error", False)])
def test_a_worker_whose_device_is_broken_is_dismissed(tmp_path, monkeypatch, is_broken, status, ends):
    """The device is made up: a broken context answers as CUDA documents."""
    worker = Worker(Heartbeat())
    failed = Failed(arm=FUSED, status=Status(status), message="illegal access")
    monkeypatch.setattr(answers, "HANDLERS", {**answers.HANDLERS, Observe: lambda *_: failed})
    monkeypatch.setattr("attnbench.devices.cuda.Cuda.is_broken", lambda _: is_broken)
    request = Observe(
        workload=msgspec.structs.replace(SMALL, device="cuda"), arm=FUSED, spec="fused", metric="peak_memory"
    )
    reply = worker.answer(request)
    assert worker.is_broken is ends
    with ProcessClient(Template(tmp_path / "log"), 60.0) as client:
        client.start()
        line = enveloped(reply, ends=is_broken)
        monkeypatch.setattr(client, "_read_line", lambda _: line)
        assert client.ask(request) == reply
        assert client.is_running is not ends


def test_a_device_that_is_not_there_breaks_no_worker(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    request = Prepare(
        workload=msgspec.structs.replace(SMALL, device="cuda"),
        arm=FUSED,
        spec="fused",
        call_limit_s=5.0,
        memory_limit_bytes=2**30,
    )
    worker = Worker(Heartbeat())
    reply = worker.answer(request)
    assert isinstance(reply, Failed)
    assert (reply.status, worker.is_broken) == (Status.unsupported, False)


class Forging(SimulatedClient):
    """Answers about another implementation, and with negative measurements."""

    def ask(self, request):
        reply = super().ask(request)
        if isinstance(reply, CellChecked | CellMeasured):
            reply = msgspec.structs.replace(reply, implementation="baseline", workload="nowhere")
        if isinstance(reply, CellMeasured) and request.arm.implementation == "slow":
            below = (Sample(value=-1.0),)
            return msgspec.structs.replace(reply, measurement=msgspec.structs.replace(reply.measurement, samples=below))
        return reply


def test_an_answer_counts_for_the_cell_that_was_asked_about_and_must_make_sense(tmp_path):
    asked = msgspec.structs.replace(
        virtual.plan(1, ("baseline", "slow"), budget_s=5.0), metrics=("latency", "peak_memory")
    )
    results = virtual.execute(asked, tmp_path / "run", client(Forging))
    fast, slow = results.records
    assert (fast.status, fast.implementation) == (Status.ok, "baseline")
    assert slow.status is Status.invalid
    assert slow.message == "its process answered what cannot be: -1.0 is not allowed: 0 or more"


@pytest.mark.usefixtures("forked_workers")
def test_an_answer_of_another_kind_is_none(tmp_path, monkeypatch):
    with ProcessClient(Template(tmp_path / "log"), 30.0) as worker:
        worker.start()
        monkeypatch.setattr(worker, "_read_line", lambda _: enveloped(Done()))
        prepare = Prepare(workload=SMALL, arm=FUSED, spec="fused", call_limit_s=1.0, memory_limit_bytes=0)
        reply = worker.ask(prepare)
    assert (reply.status, reply.is_lost) == (Status.crashed, True)
    assert reply.message == "the process wrote no valid answer"


def test_a_journal_has_one_writer_at_a_time(tmp_path):
    with Journal(tmp_path), pytest.raises(ValueError, match="written by another process"):
        Journal(tmp_path)
    with Journal(tmp_path):
        pass
