"""Failures during a run: the blamed cell, the cost, and the run's end."""

import msgspec
import pytest
import torch

from attnbench.analysis.results import read
from attnbench.devices import waiting
from attnbench.processes.messages import Failed, Heartbeat, Prepared, SampleBlocks, line, reply, request
from attnbench.processes.worker.answers import Worker
from attnbench.processes.worker_client import ProcessClient, Template
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import place_of
from attnbench.storage.journal import Journal
from attnbench.storage.records import PROBE, Arm, Sample, Status
from attnbench.timing.schedule import DECIDED, NOTHING, SPENT
from attnbench.workloads.workload import Workload
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient
from studies.simulated.worlds import WORLDS
from tests.checks import LIMIT_S, cell_of, checked

SMALL = Workload(seq_len=4, num_heads=2, head_dim=4)
FUSED = Arm(implementation="fused")


def ran(folder, kind=SimulatedClient, names=("baseline", "slow"), cells=2, budget_s=10.0, **more):
    client = kind(WORLDS["calm"], lambda _, name: 2e-3 if name == "slow" else 1e-3, seed=1)
    plan = msgspec.structs.replace(virtual.plan(cells, names, budget_s=budget_s), **more)
    return virtual.execute(plan, folder / "run", client)


@pytest.mark.parametrize(("names", "reason"), [(("baseline",), NOTHING), (("baseline", "slow"), DECIDED)])
def test_a_run_with_nothing_to_compare_comes_to_its_end(tmp_path, names, reason):
    results = ran(tmp_path, names=names, budget_s=30.0)
    assert results.reason == reason
    assert results.elapsed_s is not None
    assert {record.status for record in results.records} == {Status.ok}


def test_where_every_block_is_discarded_the_budget_is_spent_and_nothing_is_said(tmp_path, monkeypatch):
    def add(self, workload, probes, _kind):
        for sample in probes:
            self.num_blocks += 1
            self.discarded.setdefault(workload, set()).add(place_of(sample))

    monkeypatch.setattr(InterferenceGauge, "add", add)
    results = ran(tmp_path, cells=1)
    assert results.reason == SPENT
    assert results.elapsed_s >= 10.0


class NoRoom(SimulatedClient):
    """One workload does not fit into memory with its inputs."""

    def sample_blocks(self, visit):
        if visit.workload.seq_len == 8:
            return Failed(arm=PROBE, status=Status.out_of_memory, message="no room")
        return super().sample_blocks(visit)


def test_what_the_harness_itself_cannot_do_costs_the_workload_and_blames_nobody(tmp_path):
    results = ran(tmp_path, NoRoom)
    lost = {record.implementation: record for record in results.records if record.workload.seq_len == 8}
    assert lost.keys() == {"baseline", "slow"}
    assert {(each.status, each.message) for each in lost.values()} == {
        (Status.out_of_memory, "while the harness prepared or read the workload: no room")
    }
    assert all(record.status is Status.ok for record in results.records if record.workload.seq_len != 8)


class Saboteur(SimulatedClient):
    """Wherever the code with a process of its own takes part, the template of all processes is killed."""

    def sample_blocks(self, visit):
        if any(spec == "slow" for _, spec in visit.arms):
            return Failed(arm=PROBE, status=Status.crashed, message="killed", is_lost=True)
        return super().sample_blocks(visit)


def test_if_the_harness_fails_next_to_foreign_code_that_goes_first(tmp_path):
    results = ran(tmp_path, Saboteur, names=("baseline", "fast", "slow"), alone=("slow",))
    status = {(record.implementation, record.status) for record in results.records}
    assert status == {("baseline", Status.ok), ("fast", Status.ok), ("slow", Status.crashed)}


class Crowded(SimulatedClient):
    """Every request fails for lack of memory in all but a fresh process."""

    is_fresh = False

    def start(self, layout=0):
        self.is_fresh = True
        return super().start(layout)

    def ask(self, function, result, /, **arguments):
        if not self.is_fresh:
            return Failed(arm=PROBE, status=Status.out_of_memory, message="no room")
        self.is_fresh = False
        return super().ask(function, result, **arguments)


class Killed(SimulatedClient):
    """The process ends outside of all calls in its second visit, as if foreign code had killed its template."""

    num_requests = 0

    def sample_blocks(self, visit):
        Killed.num_requests += 1
        if Killed.num_requests == 2:
            self.stop()
            return Failed(arm=PROBE, status=Status.crashed, message="killed", is_lost=True)
        return super().sample_blocks(visit)


@pytest.mark.parametrize("kind", [Crowded, Killed])
def test_a_process_that_is_full_or_killed_is_replaced_and_costs_nobody_a_time(tmp_path, kind):
    assert {record.status for record in ran(tmp_path, kind).records} == {Status.ok}


class Unloadable(SimulatedClient):
    """One implementation cannot be imported, and the attempt takes a minute."""

    num_imports = 0

    def check(self, cell, **more):
        if cell.arm.implementation == "slow":
            Unloadable.num_imports += 1
            return Failed(status=Status.error, message="ImportError: no such module", is_unloadable=True)
        return super().check(cell, **more)


def test_what_cannot_be_loaded_is_tried_once_and_named_once(tmp_path):
    results = ran(tmp_path, Unloadable, cells=5)
    records = [record for record in results.records if record.implementation == "slow"]
    assert Unloadable.num_imports == 1
    assert len(records) == 5
    assert [record.message for record in records if record.is_finding] == ["ImportError: no such module"]
    assert sum(record.is_predicted for record in records) == 4


class Elsewhere(SimulatedClient):
    """The process after those of checks, ceilings and the first visits has another version of torch."""

    def start(self, layout=0):
        ready = super().start(layout)
        moved = msgspec.structs.replace(ready.environment, versions={**ready.environment.versions, "torch": "9.9"})
        return ready if layout <= 2 else msgspec.structs.replace(ready, environment=moved)


def test_a_run_ends_where_its_environment_changes_under_it(tmp_path):
    with pytest.raises(ValueError, match="began in another environment"):
        ran(tmp_path, Elsewhere, budget_s=30.0)
    kept = read(tmp_path / "run")
    assert kept.elapsed_s is None
    assert sum(kept.num_visits.values()) == 2  # the first round
    assert ran(tmp_path, budget_s=30.0).elapsed_s is not None  # it left no lock behind


class Forging(SimulatedClient):
    """Answers about another implementation, and with negative measurements."""

    def check(self, cell, **more):
        return msgspec.structs.replace(super().check(cell, **more), implementation="baseline", workload="nowhere")

    def observe(self, cell, metric):
        found = msgspec.structs.replace(super().observe(cell, metric), implementation="baseline", workload="nowhere")
        if cell.arm.implementation == "slow":
            below = msgspec.structs.replace(found.measurement, samples=(Sample(value=-1.0),))
            return msgspec.structs.replace(found, measurement=below)
        return found


def test_an_answer_counts_for_the_cell_that_was_asked_about_and_must_make_sense(tmp_path):
    fast, slow = ran(tmp_path, Forging, cells=1, metrics=("latency", "peak_memory")).records
    assert (fast.status, fast.implementation) == (Status.ok, "baseline")
    assert slow.status is Status.invalid
    assert slow.message == "its process sent an impossible result: -1.0 is not allowed: 0 or more"


def visit(spec, **settings):
    arms = ((FUSED, spec), (PROBE, ""), (Arm(implementation="sdpa"), "sdpa"))
    return SampleBlocks(workload=SMALL, arms=arms, epoch=0, number=0, num_blocks=1, seed=0, **settings)


def test_inputs_that_find_no_room_are_the_harness_own_failure(monkeypatch):
    worker = Worker(Heartbeat())

    def bench(_):
        raise MemoryError("no room")

    monkeypatch.setattr(worker, "bench", bench)
    failed = worker.answer("sample_blocks", visit=visit("fused"))
    assert (failed.arm, failed.status) == (PROBE, Status.out_of_memory)


@pytest.mark.parametrize("spec", ["fused", "no such file.py:mine"])
def test_a_worker_whose_turn_ends_lets_its_threads_sleep_whatever_came_of_it(monkeypatch, spec):
    worker, turns = Worker(Heartbeat()), []
    monkeypatch.setattr(waiting, "wait_for_idle_threads", lambda: turns.append(spec))
    worker.answer("sample_blocks", visit=visit(spec))
    assert turns == []
    worker.answer("sample_blocks", visit=visit(spec, settles=True))
    assert turns == [spec]


RUDE = """
import torch

def rude(query, key, value, *, mask=None):
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    raise RuntimeError("and good night")
"""


def test_who_changes_the_process_and_then_fails_leaves_it_as_it_was(tmp_path):
    (tmp_path / "rude.py").write_text(RUDE)
    failed = checked(cell_of(f"{tmp_path / 'rude.py'}:rude", SMALL))
    assert failed.status is Status.error
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("is_broken", [True, False])
def test_a_worker_whose_device_is_broken_is_dismissed(tmp_path, monkeypatch, is_broken):
    """The device is made up: a broken context answers as CUDA documents."""
    worker = Worker(Heartbeat())
    failed = Failed(arm=FUSED, status=Status.error, message="illegal access")
    monkeypatch.setattr(Worker, "observe", lambda *_, **__: failed)
    monkeypatch.setattr("attnbench.devices.cuda.Cuda.is_broken", lambda _: is_broken)
    cell = cell_of("fused", msgspec.structs.replace(SMALL, device="cuda"), "fused")
    found = worker.answer("observe", cell=cell, metric="peak_memory")
    assert worker.is_broken is is_broken
    with ProcessClient(Template(tmp_path / "log"), 60.0) as client:
        client.start()
        monkeypatch.setattr(client, "_read_line", lambda *_: line(reply(found, ends=is_broken)))
        assert client.ask("observe", Prepared, cell=cell, metric="peak_memory") == found
        assert client.is_running is not is_broken


def test_a_device_that_is_not_there_breaks_no_worker():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    worker, cell = Worker(Heartbeat()), cell_of("fused", msgspec.structs.replace(SMALL, device="cuda"))
    failed = worker.answer("prepare", cell=cell, limit_s=LIMIT_S)
    assert isinstance(failed, Failed)
    assert (failed.status, worker.is_broken) == (Status.unsupported, False)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    "forged",
    [reply(None), request("compute", {})],
    ids=["of another kind", "a question, which only a judge may ask"],
)
def test_an_answer_of_another_kind_is_none(tmp_path, monkeypatch, forged):
    with ProcessClient(Template(tmp_path / "log"), 30.0) as client:
        client.start()
        monkeypatch.setattr(client, "_read_line", lambda *_: line(forged))
        failed = client.ask("prepare", Prepared, cell=cell_of("fused", SMALL), limit_s=LIMIT_S)
    assert (failed.status, failed.is_lost) == (Status.crashed, True)
    assert failed.message.startswith("the process wrote no valid answer")  # it may be loading meanwhile


def test_a_journal_has_one_writer_at_a_time(tmp_path):
    with Journal(tmp_path), pytest.raises(ValueError, match="written by another process"):
        Journal(tmp_path)
    with Journal(tmp_path):
        pass
