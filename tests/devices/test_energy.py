"""Energy of a call, from a made-up counter of a device."""

import contextlib
from types import SimpleNamespace

import pytest

from attnbench.metrics import Metric, energy
from attnbench.processes.messages import Heartbeat, Target
from attnbench.processes.worker.answers import Worker
from attnbench.storage.records import Arm
from attnbench.workloads.workload import Workload

CALL_J, CALL_S = 2.5, 0.001


def case(monkeypatch, step_j: float = 100.0, *, has_counter: bool = True) -> SimpleNamespace:
    """A case whose calls are queued and use CALL_J joules each, on a device whose counter moves by `step_j`.

    The clock is the device's: it moves when the host waits.
    """
    queued, done = [0], [0]

    def call() -> None:
        queued[0] += 1

    def synchronize() -> None:
        done[0] = queued[0]

    def read() -> float | None:
        used_j = 1000 + CALL_J * done[0]
        return used_j - used_j % step_j if has_counter else None

    monkeypatch.setattr(energy, "perf_counter", lambda: CALL_S * done[0])
    device = SimpleNamespace(synchronize=synchronize, energy_j=read)
    return SimpleNamespace(device=device, grad_mode=contextlib.nullcontext, call=lambda: call)


@pytest.mark.parametrize("step_j", [0.001, 100.0, 250.0])
def test_the_energy_of_a_call_is_the_mean_between_two_changes_of_the_counter(step_j, monkeypatch):
    """The host waits at each reading: without that, the clock and the counter stand still."""
    measured = energy.measure(case(monkeypatch, step_j))
    assert measured == pytest.approx(CALL_J, rel=0.03)


def test_a_counter_that_never_moves_gives_no_number(monkeypatch):
    assert energy.measure(case(monkeypatch, 1e9)) is None


def test_only_a_device_with_a_counter_has_the_metric(monkeypatch):
    assert energy.measure(case(monkeypatch, has_counter=False)) is None
    assert energy.METRIC.fits(Workload(device="cuda"))
    assert not energy.METRIC.fits(Workload())


def test_a_metric_that_nothing_counts_is_a_note_and_no_number():
    worker = Worker(Heartbeat())
    worker.metrics["energy"] = Metric(unit="J", summary="nothing", measure=lambda _: None)
    cell = Target(workload=Workload(seq_len=8, num_heads=1, head_dim=4), arm=Arm(implementation="sdpa"), spec="sdpa")
    measured = worker.answer("observe", cell=cell, metric="energy").measurement
    assert (measured.samples, measured.warnings) == ((), ("energy: no counter can be read here",))
