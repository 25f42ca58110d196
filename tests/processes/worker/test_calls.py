"""Timed calls, as launches and as graphs of them: calls that allow no graph have no time."""

import itertools

import pytest

from attnbench.case import bind, build, draw_normal, place
from attnbench.contract.loading import implementation
from attnbench.devices import CaptureError, cpu, device
from attnbench.processes.messages import Failed, FailedError, Heartbeat, SampleBlocks
from attnbench.processes.planning import build_plan
from attnbench.processes.worker.answers import Worker, replayed
from attnbench.storage.events import VisitFinished
from attnbench.storage.records import Arm, DeviceState, Status
from attnbench.workloads.workload import Workload

SMALL = Workload(seq_len=8, num_heads=2, head_dim=4, direction="inference")


def visit(workload: Workload, *specs: str, **settings) -> SampleBlocks:
    arms = tuple((Arm(implementation=spec), spec) for spec in specs)
    return SampleBlocks(workload=workload, arms=arms, epoch=0, number=0, num_blocks=1, seed=0, **settings)


def whole(_, make):
    """Capture all of a call: its replay computes from the values that its inputs have then."""
    return make()


def stale(_, make):
    """Capture a call of which nothing depends on its inputs any more, as after a copy to the host."""
    result = make()()
    return lambda: result


def refused(_, make):
    """Refuse a call that waits for the device."""
    raise CaptureError(f"it cannot be recorded as a graph: {make}")


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(cpu.Cpu, "has_graphs", True)
    return lambda captured: monkeypatch.setattr(cpu.Cpu, "captured", captured)


@pytest.mark.parametrize("direction", ["inference", "forward", "backward", "forward_backward"])
@pytest.mark.parametrize(
    ("captured", "words"), [(whole, ""), (stale, "not in the graph"), (refused, "cannot be recorded")]
)
def test_a_replay_is_timed_only_if_it_computes_what_the_call_does(captures, captured, words, direction):
    workload = Workload(seq_len=8, num_heads=2, head_dim=4, direction=direction)
    captures(captured)
    reply = Worker(Heartbeat()).answer("sample_blocks", visit=visit(workload, "fused"))
    assert isinstance(reply, VisitFinished)  # launches are no graph
    worker = Worker(Heartbeat())
    reply = worker.answer("sample_blocks", visit=visit(workload, "fused", "sdpa", launch="graph"))
    assert isinstance(reply, Failed) is bool(words)
    assert worker.is_broken is bool(words)  # its process is replaced
    if words:
        assert (reply.status, reply.arm) == (Status.unsupported, Arm(implementation="fused"))
        assert words in reply.message


def test_a_graph_that_no_longer_does_what_the_call_does_is_seen_after_the_visit(captures):
    is_stale = []

    def changing(_, make):
        call = make()
        result = call().clone()
        return lambda: result if is_stale else call()

    captures(changing)
    worker = Worker(Heartbeat())
    assert isinstance(worker.answer("sample_blocks", visit=visit(SMALL, "sdpa", launch="graph")), VisitFinished)
    is_stale.append(True)
    failed = worker.answer("sample_blocks", visit=visit(SMALL, "sdpa", launch="graph"))
    assert isinstance(failed, Failed)
    assert "not in the graph" in failed.message


def test_what_is_dropped_at_random_has_no_graph_that_could_be_checked():
    workload = Workload(seq_len=8, num_heads=2, head_dim=4, direction="forward", dropout=0.5)
    case = build(workload, implementation("sdpa"), place(draw_normal(workload, 0), workload), bind(workload))
    with pytest.raises(FailedError, match="dropout=0"):
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
