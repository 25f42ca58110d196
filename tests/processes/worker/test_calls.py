"""Timed calls as graphs of their launches: calls that allow none have no time."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnbench.checking.case import bind, build, draw_normal, place
from attnbench.contract.loading import implementation
from attnbench.devices import CaptureError, Device, cpu, device
from attnbench.processes.messages import Failed, Heartbeat, SampleBlocks
from attnbench.processes.planning import build_plan
from attnbench.processes.worker import answers
from attnbench.processes.worker.answers import Worker, replayed
from attnbench.processes.worker.attempts import OutOfReachError
from attnbench.storage.events import VisitFinished
from attnbench.storage.records import Arm, DeviceState, Status
from attnbench.timing import blocks
from attnbench.workloads.workload import Workload
from tests.checks import cell_of
from tests.processes.worker.graphs import captured

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
    failed = worker.answer("sample_blocks", visit=visit(SMALL, "fused", spec, "sdpa", launch="graph"))
    assert isinstance(failed, Failed)
    assert (failed.status, failed.arm) == (Status.unsupported, Arm(implementation="f"))
    assert ("capturing" if name == "waits" else "outside of the graph") in failed.message
    assert worker.is_broken  # its process is replaced
    assert isinstance(Worker(Heartbeat()).answer("sample_blocks", visit=visit(SMALL, spec)), VisitFinished)
    assert isinstance(
        Worker(Heartbeat()).answer("sample_blocks", visit=visit(SMALL, "fused", "sdpa", launch="graph")), VisitFinished
    )


@pytest.mark.usefixtures("has_graphs")
def test_a_graph_that_no_longer_does_what_the_call_does_is_seen_after_the_visit(monkeypatch):
    worker, planted = Worker(Heartbeat()), []

    def stale(here: Device, make):
        replay = captured(here, make)
        result = replay()
        planted.append(result.clone())
        return lambda: replay() if len(planted) < 2 else result.copy_(planted[0])

    monkeypatch.setattr(cpu.Cpu, "captured", stale)
    assert isinstance(worker.answer("sample_blocks", visit=visit(SMALL, "sdpa", launch="graph")), VisitFinished)
    planted.append(planted[0])  # from now on it does nothing
    failed = worker.answer("sample_blocks", visit=visit(SMALL, "sdpa", launch="graph"))
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


def test_a_visit_carries_what_the_driver_says_around_its_blocks(monkeypatch):
    """It also heats up until that has settled."""
    clocks = itertools.chain([2000.0], itertools.repeat(1500.0))
    monkeypatch.setattr(cpu.Cpu, "state", lambda _: DeviceState(clock_mhz=next(clocks)))
    found = Worker(Heartbeat()).answer("sample_blocks", visit=visit(SMALL, "sdpa", sustained_s=0.05))
    assert found.states == (DeviceState(clock_mhz=1500.0),) * 2
    monkeypatch.setattr(cpu.Cpu, "state", lambda _: None)
    assert Worker(Heartbeat()).answer("sample_blocks", visit=visit(SMALL, "sdpa")).states == ()


def test_a_process_computes_before_a_witness_sample_as_before_any_other(monkeypatch):
    """Otherwise its calls would look slower than the ones they are compared with."""
    worker, cell, calls, ready = Worker(Heartbeat()), cell_of("sdpa", SMALL, "sdpa"), [], []
    worker.answer("sample_blocks", visit=visit(SMALL, "sdpa"))
    (bench,) = worker.benches.values()
    timed, steps = bench.calls[cell.arm], itertools.count()
    monkeypatch.setattr(timed, "call", lambda: calls.append(len(ready)))
    monkeypatch.setattr(answers.witness, "ready", lambda *_: ready.append(1) or [])
    monkeypatch.setattr(answers, "time", SimpleNamespace(perf_counter=lambda: next(steps) * blocks.WARM_S / 4))
    worker.answer("prepare_witness", cell=cell, num_before=2, num_calls=1, seed=0)
    assert calls == [0, 0, 1, 1, 1]
