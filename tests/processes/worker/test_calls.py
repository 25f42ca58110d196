"""Timed calls: as graphs of their launches, and on rotating inputs; calls that allow neither have no time."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnbench.analysis.results import read
from attnbench.checking.case import bind, build, draw_normal, place
from attnbench.contract.loading import implementation
from attnbench.devices import CaptureError, Device, cpu, device
from attnbench.processes import execution
from attnbench.processes.messages import Check, Done, Failed, Heartbeat, PrepareWitness, SampleBlocks, Start
from attnbench.processes.planning import build_plan
from attnbench.processes.worker import answers
from attnbench.processes.worker.answers import Worker
from attnbench.processes.worker.attempts import OutOfReachError
from attnbench.processes.worker.calls import Rotation, replayed
from attnbench.processes.worker_client import WorkerClient
from attnbench.storage.events import VisitFinished
from attnbench.storage.records import Arm, DeviceState, Status
from attnbench.timing import blocks
from attnbench.workloads.workload import Workload
from studies.simulated.graphs import captured
from tests.checks import checked

SMALL = Workload(seq_len=8, num_heads=2, head_dim=4, direction="inference")
ESCAPES = {
    "on the host": """
        def f(query, key, value, *, mask=None):
            scores = query.numpy() @ key.numpy().swapaxes(-2, -1) / query.shape[-1] ** 0.5
            return torch.from_numpy(scores).softmax(-1) @ value
    """,
    "waits": """
        def f(query, key, value, *, mask=None):
            scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
            if scores.max().item() > 1e9:
                raise ValueError
            return scores.softmax(-1) @ value
    """,
}


@pytest.fixture
def has_graphs(monkeypatch):
    monkeypatch.setattr(cpu.Cpu, "has_graphs", True)
    monkeypatch.setattr(cpu.Cpu, "captured", captured)


def case_of(spec: str, workload: Workload = SMALL):
    return build(workload, implementation(spec), place(draw_normal(workload, 0), workload), bind(workload))


def spec_of(folder: Path, name: str) -> str:
    file = folder / f"{name.replace(' ', '_')}.py"
    lines = [line[8:] for line in ESCAPES[name].splitlines()]
    file.write_text("import torch\n" + "\n".join(lines))
    return f"{file}:f"


def visit(workload: Workload, *specs: str, **settings) -> SampleBlocks:
    arms = tuple((Arm(implementation=spec.rpartition(":")[2]), spec) for spec in specs)
    return SampleBlocks(workload=workload, arms=arms, epoch=0, number=0, num_blocks=1, seed=0, **settings)


@pytest.mark.usefixtures("has_graphs")
@pytest.mark.parametrize("direction", ["inference", "forward", "backward", "forward_backward"])
@pytest.mark.parametrize("spec", ["fused", "sdpa", "bmm"])
def test_a_replay_computes_what_the_call_does_on_the_values_that_its_inputs_have_then(spec, direction):
    case = case_of(spec, Workload(seq_len=8, num_heads=2, head_dim=4, mask="causal", direction=direction))
    with case.grad_mode():
        replay, call = replayed(case), case.call()
        with case.holding({"query": 3 * case.tensors["query"].detach()}):
            results = [each if isinstance(each, tuple) else (each,) for each in (replay(), call())]
            for seen, expected in zip(*results, strict=True):
                torch.testing.assert_close(seen, expected)


@pytest.mark.usefixtures("has_graphs")
@pytest.mark.parametrize("name", ESCAPES)
def test_work_outside_of_the_graph_is_seen_and_costs_its_own_cell_alone(name, tmp_path):
    """The check of the answers calls eagerly, and passes all of them."""
    spec, worker = spec_of(tmp_path, name), Worker(Heartbeat())
    failed = worker.answer(visit(SMALL, "fused", spec, "sdpa", launch="graph"))
    assert isinstance(failed, Failed)
    assert (failed.status, failed.arm) == (Status.unsupported, Arm(implementation="f"))
    assert ("capturing" if name == "waits" else "outside of the graph") in failed.message
    assert worker.is_broken  # its process is replaced
    assert isinstance(Worker(Heartbeat()).answer(visit(SMALL, spec)), VisitFinished)
    assert isinstance(Worker(Heartbeat()).answer(visit(SMALL, "fused", "sdpa", launch="graph")), VisitFinished)


@pytest.mark.usefixtures("has_graphs")
def test_a_graph_that_no_longer_does_what_the_call_does_is_seen_after_the_visit(monkeypatch):
    worker, planted = Worker(Heartbeat()), []

    def stale(here: Device, make):
        replay = captured(here, make)
        result = replay()
        planted.append(result.clone())
        return lambda: replay() if len(planted) < 2 else result.copy_(planted[0])

    monkeypatch.setattr(cpu.Cpu, "captured", stale)
    assert isinstance(worker.answer(visit(SMALL, "sdpa", launch="graph")), VisitFinished)
    planted.append(planted[0])  # from now on it does nothing
    failed = worker.answer(visit(SMALL, "sdpa", launch="graph"))
    assert isinstance(failed, Failed)
    assert "outside of the graph" in failed.message


@pytest.mark.usefixtures("has_graphs")
def test_what_is_dropped_at_random_has_no_graph_that_could_be_checked():
    case = case_of("sdpa", Workload(seq_len=8, num_heads=2, head_dim=4, direction="forward", dropout=0.5))
    with pytest.raises(OutOfReachError, match="dropout=0"):
        replayed(case)


def test_a_device_without_graphs_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="cpu has no graphs of launches"):
        build_plan(sweep="quick", settings=["device=cpu"], launch="graph")
    with pytest.raises(CaptureError, match="cpu has no graphs"):
        device("cpu").captured(lambda: lambda: None)


def test_inputs_rotate_through_copies_that_exceed_the_cache_whichever_arm_calls(monkeypatch):
    monkeypatch.setattr(cpu.Cpu, "cache_bytes", lambda _: 1000)
    inputs = place(draw_normal(SMALL, 0), SMALL)
    size = sum(each.untyped_storage().nbytes() for each in inputs.tensors.values())
    rotation = Rotation(SMALL, inputs)
    number = len(rotation.inputs)
    assert number == 1 + math.ceil(2 * 1000 / size)
    places = [each.tensors["query"].data_ptr() for each in rotation.inputs]
    assert len(set(places)) == number
    cases = rotation.cases(case_of("sdpa"))
    seen: list[int] = []
    calls = [rotation.through([lambda n=n: seen.append(n) for n in range(number)]) for _ in range(2)]
    for n in range(2 * number):
        calls[n % 2]()
    assert seen == [*range(number)] * 2  # the copy used last comes last, for both arms together
    outputs = [each.output() for each in cases]
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    assert [each.tensors["query"].data_ptr() for each in cases[1:]] == places[1:]


@pytest.mark.parametrize("layout", ["transposed", "expanded", "value_in_key"])
@pytest.mark.parametrize("direction", ["inference", "backward"])
def test_copies_keep_the_layout_and_have_gradients_of_their_own(layout, direction, monkeypatch):
    workload = Workload(seq_len=8, num_heads=2, head_dim=4, layout=layout, direction=direction)
    monkeypatch.setattr(cpu.Cpu, "cache_bytes", lambda _: 3000)
    worker = Worker(Heartbeat())
    assert isinstance(worker.answer(visit(workload, "fused", "sdpa", cache="rotating")), VisitFinished)
    (bench,) = worker.benches.values()
    strides = {each.tensors["key"].stride() for each in bench._rotation.inputs}
    assert len(strides) == 1
    assert bench.cases[Arm(implementation="sdpa")].tensors["query"].requires_grad is (direction == "backward")


@pytest.mark.usefixtures("has_graphs")
@pytest.mark.parametrize("launch", ["eager", "graph"])
def test_each_copy_and_the_call_on_it_has_a_heartbeat_of_its_arm(launch, monkeypatch):
    """There was once one for all of them, and hundreds of graphs were recorded without a heartbeat."""
    monkeypatch.setattr(cpu.Cpu, "cache_bytes", lambda _: 20_000)
    worker, beats = Worker(Heartbeat()), []
    monkeypatch.setattr(worker.heartbeat, "beat", lambda arm=0: beats.append(arm))
    taken, real = list[int](), blocks.visit  # number of beats at the start of the blocks
    monkeypatch.setattr(blocks, "visit", lambda *given: (taken.append(len(beats)), real(*given))[1])
    assert isinstance(worker.answer(visit(SMALL, "fused", "sdpa", cache="rotating", launch=launch)), VisitFinished)
    (bench,) = worker.benches.values()
    number = len(bench._rotation.inputs)
    assert number > 5
    before = beats[: taken[0]]
    assert before.count(0) >= (number - 1) + number  # the copies are made in the first arm's turn
    assert before.count(1) >= number


@pytest.mark.parametrize(("cache", "free"), [(2**30, 2**40), (2**14, 2**10)], ids=["too many", "no memory"])
def test_what_cannot_rotate_is_unsupported_and_says_what_it_would_take(cache, free, monkeypatch):
    monkeypatch.setattr(cpu.Cpu, "cache_bytes", lambda _: cache)
    monkeypatch.setattr(cpu.Cpu, "free_bytes", lambda _: free)
    failed = Worker(Heartbeat()).answer(visit(SMALL, "sdpa", cache="rotating"))
    assert isinstance(failed, Failed)
    assert failed.status is Status.unsupported
    assert "copies of" in failed.message


@pytest.mark.usefixtures("has_graphs")
def test_inputs_rotate_through_graphs_too(monkeypatch):
    monkeypatch.setattr(cpu.Cpu, "cache_bytes", lambda _: 1000)
    worker = Worker(Heartbeat())
    assert isinstance(worker.answer(visit(SMALL, "sdpa", cache="rotating", launch="graph")), VisitFinished)
    (bench,) = worker.benches.values()
    timed = bench.calls[Arm(implementation="sdpa")].call
    results = {id(timed()) for _ in bench._rotation.inputs}
    assert len(results) == len(bench._rotation.inputs)  # each graph has a result of its own


def test_a_visit_carries_what_the_driver_says_around_its_blocks(monkeypatch):
    """It also heats up until that has settled."""
    clocks = itertools.chain([2000.0], itertools.repeat(1500.0))
    monkeypatch.setattr(cpu.Cpu, "state", lambda _: DeviceState(clock_mhz=next(clocks)))
    found = Worker(Heartbeat()).answer(visit(SMALL, "sdpa", sustained_s=0.05))
    assert found.states == (DeviceState(clock_mhz=1500.0),) * 2
    monkeypatch.setattr(cpu.Cpu, "state", lambda _: None)
    assert Worker(Heartbeat()).answer(visit(SMALL, "sdpa")).states == ()


def test_calls_before_a_witness_leave_the_way_of_calling_as_it_was_asked(monkeypatch):
    monkeypatch.setattr(cpu.Cpu, "cache_bytes", lambda _: 1000)
    worker, arm = Worker(Heartbeat()), Arm(implementation="sdpa")
    cell = {"workload": SMALL, "arm": arm, "spec": "sdpa"}
    assert isinstance(worker.answer(PrepareWitness(**cell, num_before=1, before_s=1.0, num_calls=1, seed=0)), Done)
    assert isinstance(worker.answer(visit(SMALL, "sdpa", cache="rotating")), VisitFinished)
    (bench,) = worker.benches.values()
    before = bench.cases[arm].tensors["query"]
    assert bench._rotation is not None
    assert all(each.tensors["query"] is not before for each in bench._rotation.cases(bench.cases[arm])[1:])


def test_a_process_computes_before_a_witness_sample_as_before_any_other(monkeypatch):
    """Otherwise its calls would look slower than the ones they are compared with."""
    worker, arm, calls, ready = Worker(Heartbeat()), Arm(implementation="sdpa"), [], []
    cell = {"workload": SMALL, "arm": arm, "spec": "sdpa"}
    worker.answer(visit(SMALL, "sdpa"))
    (bench,) = worker.benches.values()
    timed, steps = bench.calls[arm], itertools.count()
    monkeypatch.setattr(timed, "call", lambda: calls.append(len(ready)))
    monkeypatch.setattr(answers.witness, "ready", lambda *_: ready.append(1) or [])
    monkeypatch.setattr(answers, "time", SimpleNamespace(perf_counter=lambda: next(steps) * blocks.WARM_S / 4))
    worker.answer(PrepareWitness(**cell, num_before=2, before_s=9.0, num_calls=1, seed=0))
    assert calls == [0, 0, 1, 1, 1]


class Here(WorkerClient):
    """The worker of a run in this process, replaced when it becomes unusable."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.num_started = 0

    @property
    def is_running(self):
        return self.worker is not None

    def start(self, layout=0):
        self.worker, self.num_started = Worker(Heartbeat()), self.num_started + 1
        return self.worker.answer(Start(layout=layout))

    def ask(self, request):
        worker = self.worker
        reply = checked(request, worker) if isinstance(request, Check) else worker.answer(request)
        self.worker = None if worker.is_broken else worker
        return reply

    def stop(self):
        self.worker = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


@pytest.mark.long
@pytest.mark.usefixtures("has_graphs")
def test_a_run_on_graphs_ends_with_the_times_of_all_that_can_be_replayed(tmp_path):
    specs = [spec_of(tmp_path, name) for name in ESCAPES]
    named = [f"{name}={spec}" for name, spec in zip(("host", "waits"), specs, strict=True)]
    settings = ["seq_len=8", "num_heads=2", "head_dim=4", "direction=inference", "mask=none", "device=cpu"]
    asked = build_plan(
        sweep="quick",
        settings=settings,
        is_exact=True,
        implementations=("fused", *named),
        budget_s=0.0,
        launch="graph",
        metrics=("latency",),
        isolation="shared",
    )
    with Here() as client:
        execution.execute(asked, tmp_path / "run", lambda _: None, stages=("check", "time"), client=client)
    found = {record.implementation: record for record in read(tmp_path / "run").records}
    assert {name: record.status for name, record in found.items()} == {
        "fused": Status.ok,
        "sdpa": Status.ok,
        "host": Status.unsupported,
        "waits": Status.unsupported,
    }
    assert all(bool(record.samples("latency")) is (record.status is Status.ok) for record in found.values())
    assert client.num_started >= 3  # a process with a failed recording is replaced
