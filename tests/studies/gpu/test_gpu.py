"""The study of a GPU, rehearsed on the CPU: it writes an archive for any outcome of its steps, and can be resumed."""

import json
import subprocess
import sys
import tarfile

import psutil
import pytest

from studies.gpu import __main__ as command
from studies.gpu import plan, steps, work
from studies.gpu.steps import DIED, FAILED, HUNG, LEFT_OUT, OK, Step
from tests import forks


def step(name, work_name, *given, limit_s=60.0):
    return Step(name=name, work=work_name, given=given, limit_s=limit_s)


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(sys, "executable", forks.python())


def outcomes(asked, out):
    """Run steps; return their outcomes."""
    assert steps.run_all(asked, out, 1e9)
    return [row["outcome"] for _, row in steps.ended(asked, out)]


def test_a_step_that_hangs_is_killed_and_one_that_dies_is_named_and_the_next_is_run(tmp_path, started):
    asked = [step("planted-hang", "hang", limit_s=1.0), step("planted-die", "die"), step("versions", "versions")]
    assert outcomes(asked, tmp_path) == [HUNG, DIED, OK]
    found = dict(steps.ended(asked, tmp_path))
    assert found["planted-die"]["reason"] == "SIGABRT"
    outcomes(asked, tmp_path)
    assert dict(steps.ended(asked, tmp_path)) == found  # no step ran twice


@pytest.mark.long
def test_of_a_step_that_hangs_nothing_is_left_running(tmp_path, started):
    """Its child processes once ran on for an hour, if its process was a fork of another one's."""
    subprocess.run([sys.executable, "-c", ""], check=True)  # its server takes seconds to start
    assert outcomes([step("planted-hang", "hang", limit_s=8.0)], tmp_path) == [HUNG]
    number = int((tmp_path / "logs" / "planted-hang.log").read_text())
    child = psutil.Process(number) if psutil.pid_exists(number) else None
    if child is not None:  # it is killed, and its new parent may need a moment to notice
        psutil.wait_procs([child], timeout=100.0)
    assert child is None or not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_no_step_is_begun_that_may_end_too_late(tmp_path):
    assert not steps.run_all([step("planted-hang", "hang", limit_s=60.0)], tmp_path, 30.0)
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_a_reason_and_no_crash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def lacking(*given):
        import no_such_package  # noqa: F401

    monkeypatch.setitem(work.WORK, "versions", lacking)
    work.main("versions", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_bytes())
    assert (found["outcome"], found["reason"]) == (LEFT_OUT, "no_such_package is not installed")
    work.main("gauge", tmp_path / "gauge.json", "cuda", "kernel_sum")
    assert json.loads((tmp_path / "gauge.json").read_bytes())["outcome"] in {LEFT_OUT, OK, FAILED}


def test_each_test_of_a_device_has_a_process_of_its_own(monkeypatch):
    """A lost context once failed all tests after it."""
    started = []

    def lose(*arguments, cwd):
        started.append(arguments[-1])
        return subprocess.CompletedProcess(arguments, returncode=len(started) == 1, stdout=b"")

    monkeypatch.setattr(work, "_here", lambda _: None)
    monkeypatch.setattr(work, "_python", lose)
    with pytest.raises(work.Wrong, match=r"1 of \d+ fail: test_every_implementation"):
        work.tests()
    assert len(set(started)) == len(started) >= 5


def test_who_starts_the_steps_needs_python_alone():
    block = "import sys; sys.modules |= dict.fromkeys(('torch', 'msgspec', 'numpy', 'attnbench', 'typer'));"
    command_line = [sys.executable, "-c", f"{block} import studies.gpu.__main__, studies.gpu.work"]
    subprocess.run(command_line, check=True, cwd=steps.ROOT)


def test_the_whole_has_every_implementation_and_each_step_once():
    size = plan.full()
    asked = plan.steps(size)
    names = [each.name for each in asked]
    assert len(names) == len(set(names))
    assert {f"gauge-{each}" for each in plan.GAUGES} <= set(names)
    assert {"check", "check-tf32", "check-compiled", "run", "tests"} <= set(names)
    assert {each.work for each in asked} <= set(work.WORK)


@pytest.mark.long
def test_a_rehearsal_comes_to_its_end_and_a_second_start_does_nothing_twice(tmp_path, started, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    asked = plan.steps(plan.rehearsal())
    assert command.main(["--out", str(tmp_path), "--rehearse"]) == 0
    found = dict(steps.ended(asked, tmp_path))
    assert {name: row for name, row in found.items() if row["outcome"] == FAILED} == {}
    assert (found["planted-hang"]["outcome"], found["planted-die"]["outcome"]) == (HUNG, DIED)
    assert {found[f"gauge-{each}"]["outcome"] for each in plan.GAUGES} == {OK}  # on the simulated device
    with tarfile.open(tmp_path / command.ARCHIVE) as packed:
        names = packed.getnames()
    for part in ("/table.md", "/journal.jsonl", ".trace.json.gz", "/planted-die.log"):
        assert any(name.endswith(part) for name in names), part
    assert command.main(["--out", str(tmp_path), "--rehearse"]) == 0
    assert dict(steps.ended(asked, tmp_path)) == found


def test_a_step_that_a_driver_holds_costs_itself_alone(tmp_path, started, monkeypatch):
    """A process that waits inside a driver does not end when it is killed."""
    wait = steps.subprocess.Popen.wait

    def held(process, timeout=None):
        if timeout == steps.CLOSING_S:
            wait(process)
            raise steps.subprocess.TimeoutExpired(process.args, timeout)
        return wait(process, timeout)

    monkeypatch.setattr(steps.subprocess.Popen, "wait", held)
    asked = [step("planted-hang", "hang", limit_s=1.0), step("versions", "versions")]
    assert outcomes(asked, tmp_path) == [HUNG, OK]
