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

FIT = msgspec.structs.replace(
    ENVIRONMENT,
    system="Linux x86_64",
    num_physical_cores=4,
    num_logical_cores=4,
    num_threads=4,
    clocks={"governor": "performance"},
)


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


def test_nothing_is_advised_on_a_machine_that_is_fit(monkeypatch):
    assert advice(monkeypatch) == {}


def test_clocks_that_follow_the_load(monkeypatch):
    assert advice(monkeypatch, clocks={"governor": "powersave"}) == {
        "frequency governor": "clocks follow the load: set the governor to performance"
    }


def test_other_work(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_percent", lambda **_: 60.0)
    assert advice(monkeypatch) == {"load": "other work is running: stop it, or expect wide intervals"}


def test_a_coarse_timer(monkeypatch):
    monkeypatch.setattr(device("cpu"), "clock", SimpleNamespace(resolution_s=1e-4))
    assert advice(monkeypatch) == {"timer step": "the timer is coarse: samples are made longer to suit it"}


def test_more_threads_than_cores(monkeypatch):
    reported = advice(monkeypatch, num_threads=8)
    assert reported == {"threads": "more threads than cores: unset OMP_NUM_THREADS, or set it to 4"}


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "infinity"), ("KMP_BLOCKTIME", "infinite")]
)
def test_threads_that_never_sleep(monkeypatch, name, value):
    reported = f"idle threads keep their cores from the next timed call: unset {name}"
    assert advice(monkeypatch, settings={name: value}) == {"thread and malloc settings": reported}


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "passive"), ("KMP_BLOCKTIME", "0")])
def test_threads_that_sleep_are_none_of_its_business(monkeypatch, name, value):
    assert advice(monkeypatch, settings={name: value}) == {}


def test_time_that_the_host_takes(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda **_: SimpleNamespace(steal=7.0))
    reported = "the host takes time away: measure elsewhere, or take more visits"
    assert advice(monkeypatch) == {"stolen by the host": reported}


def test_a_system_that_does_not_tell_of_stolen_time_is_not_asked(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_times", SimpleNamespace)
    monkeypatch.setattr(environment, "collect", lambda: FIT)
    assert "stolen by the host" not in {found.name for found in doctor.examine()}


def compared_with_itself(warp):
    clock = VirtualClock(warp)
    work = {"one": lambda: clock.spend(2e-3)}
    compared = FunctionComparison(
        work, "one", clock=clock, gauge_work=lambda: clock.spend(PROBE_S), conditions=SIMULATED
    )
    compared.run(10.0, stops=False)
    return doctor.judge_noise(compared)


def test_the_noise_floor_is_measured_for_its_budget_and_quiet_where_the_machine_is():
    draws = np.random.default_rng(0)
    found = compared_with_itself(lambda seconds, _: seconds * math.exp(draws.normal(0, 0.01)))
    assert "(measured for 10.0 s)" in found.value
    assert not found.advice


def test_a_noise_floor_of_several_percent_is_not_good_enough():
    draws = np.random.default_rng(0)
    found = compared_with_itself(lambda seconds, _: seconds * math.exp(draws.normal(0, 0.8)))
    assert found.advice == "smaller differences cannot be detected: see what else is running"


def test_many_disturbed_blocks_are_worse():
    draws = np.random.default_rng(0)
    found = compared_with_itself(lambda seconds, _: seconds * (3.0 if draws.random() < 0.35 else 1.0))
    assert found.advice == "other work disturbs this machine: do not rely on times that are measured now"
    assert "blocks disturbed" in found.value


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
