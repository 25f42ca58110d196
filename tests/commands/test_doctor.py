"""The doctor's advice: each fault is planted, and absent on a healthy machine."""

import math
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest

from attnbench.commands import doctor
from attnbench.devices import device, environment
from attnbench.timing.blocks import SIMULATED
from attnbench.timing.functions import FunctionComparison
from studies.simulated.machine import VirtualClock
from studies.simulated.virtual import ENVIRONMENT, PROBE_S

FOUR = {"num_physical_cores": 4, "num_logical_cores": 4, "num_threads": 4}
FIT = msgspec.structs.replace(ENVIRONMENT, system="Linux x86_64", clocks={"governor": "performance"}, **FOUR)


@pytest.fixture(autouse=True)
def _fit_machine(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_percent", lambda **_: 2.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(steal=0.0))
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda **_: SimpleNamespace(steal=0.1))
    monkeypatch.setattr(environment, "usable_cores", lambda: 4)
    monkeypatch.setattr(device("cpu"), "clock", SimpleNamespace(resolution_s=1e-7))
    monkeypatch.setattr(doctor, "noise_floor", lambda: doctor.Finding(name="noise floor", value="1 %"))


def advice(monkeypatch, **changes):
    monkeypatch.setattr(environment, "collect", lambda: msgspec.structs.replace(FIT, **changes))
    return {found.name: found.advice for found in doctor.examine() if found.advice}


@pytest.mark.parametrize(
    ("changes", "patch", "name", "words"),
    [
        ({}, {}, "", ""),
        ({"clocks": {"governor": "powersave"}}, {}, "frequency governor", "set the governor to performance"),
        ({"num_threads": 8}, {}, "threads", "unset OMP_NUM_THREADS, or set it to 4"),
        ({"settings": {"OMP_WAIT_POLICY": "ACTIVE"}}, {}, "thread and malloc settings", "unset OMP_WAIT_POLICY"),
        ({"settings": {"GOMP_SPINCOUNT": "infinity"}}, {}, "thread and malloc settings", "unset GOMP_SPINCOUNT"),
        ({"settings": {"KMP_BLOCKTIME": "infinite"}}, {}, "thread and malloc settings", "unset KMP_BLOCKTIME"),
        ({"settings": {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}}, {}, "", ""),
        ({}, {"cpu_percent": 60.0}, "load", "other work is running"),
        ({}, {"cpu_times_percent": SimpleNamespace(steal=7.0)}, "stolen by the host", "the host takes time away"),
    ],
)
def test_each_fault_has_its_advice_and_no_other(monkeypatch, changes, patch, name, words):
    for function, value in patch.items():
        monkeypatch.setattr(psutil, function, lambda value=value, **_: value)
    found = advice(monkeypatch, **changes)
    assert list(found) == [name] * bool(name)
    assert words in found.get(name, "")


def test_a_system_that_does_not_tell_of_stolen_time_is_not_asked(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_times", SimpleNamespace)
    monkeypatch.setattr(environment, "collect", lambda: FIT)
    assert "stolen by the host" not in {found.name for found in doctor.examine()}


def compared_with_itself(warp):
    clock = VirtualClock(warp)
    work = dict.fromkeys(("one", doctor.AGAIN), lambda: clock.spend(2e-3))
    compared = FunctionComparison(
        work, "one", clock=clock, gauge_work=lambda: clock.spend(PROBE_S), conditions=SIMULATED
    )
    compared.run(10.0, stops=False)
    return doctor.judge_noise(compared)


@pytest.mark.parametrize(
    ("spread", "disturbed", "advice"),
    [
        (0.01, 0.0, ""),
        (0.8, 0.0, "smaller differences cannot be detected: see what else is running"),
        (0.0, 0.35, "other work disturbs this machine: do not rely on times that are measured now"),
    ],
)
def test_the_noise_floor_is_measured_for_its_budget_and_has_its_advice(spread, disturbed, advice):
    draws = np.random.default_rng(0)
    found = compared_with_itself(
        lambda seconds, _: seconds * (3.0 if draws.random() < disturbed else 1.0) * math.exp(draws.normal(0, spread))
    )
    assert "measured for 10." in found.value
    assert found.advice == advice
    assert ("blocks disturbed" in found.value) == bool(disturbed)


def test_hosts_that_differ_are_not_comparable_and_advice_is_said_with_its_host():
    same = doctor.Finding(name="load", value="1 %")
    hosts = {
        "one": [same, doctor.Finding(name="versions", value="torch 2.13")],
        "two": [same, doctor.Finding(name="versions", value="torch 2.12", advice="update it")],
    }
    lines = doctor.differences(hosts)
    assert len(lines) == 2
    assert lines[0].startswith("versions differs")
    assert "torch 2.12 on two" in lines[0]
    assert lines[1] == "two, versions: update it"
    assert doctor.differences({"one": [same], "two": [doctor.Finding(name="load", value="9 %")]}) == []
