"""A test that loses a device's context costs itself alone: shown with a marker, without a device."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

from tests import apart
from tests.devices.test_cuda import INSIDE_TORCH

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests import apart
from tests.apart import pytest_configure, pytest_runtest_protocol

apart.has_device = lambda: {has_device}
apart.LIMIT_S = {limit_s}
"""
TESTS = """
import os, time, pytest
LOST = []

def use():
    with open("processes", "a") as out:
        out.write(f"{os.getpid()}\\n")
    if LOST:
        raise RuntimeError("CUDA error: misaligned address")

@pytest.mark.cuda
def test_first_loses_the_context():
    LOST.append(1)
    use()

@pytest.mark.cuda
def test_second_finds_a_whole_one():
    use()

@pytest.mark.cuda
def test_third_takes_its_process_with_it():
    print("these are my last words", flush=True)
    os.abort()

@pytest.mark.cuda
@pytest.mark.parametrize("number", [1, 2])
def test_of_parameters_one_loses_the_context(number):
    use()
    LOST.append(number)

@pytest.mark.cuda
def test_one_is_skipped():
    pytest.skip("it has no such thing")

def test_what_is_not_marked_stays_here():
    assert "ATTNBENCH_TEST_REPORTS" not in os.environ
"""
HANGS = """
import time, pytest

@pytest.mark.cuda
def test_one_hangs():
    time.sleep(60)

@pytest.mark.cuda
def test_the_next_is_run():
    pass
"""


def run(folder: Path, tests: str, *, has_device: bool = True, limit_s: float = 60.0) -> str:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = cuda: as ours\n", encoding="utf-8")
    (folder / "conftest.py").write_text(CONFTEST.format(has_device=has_device, limit_s=limit_s), encoding="utf-8")
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:benchmark"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_test_that_loses_the_context_or_dies_costs_itself_alone(tmp_path):
    said = run(tmp_path, TESTS)
    assert "2 failed, 4 passed, 1 skipped" in said, said
    assert "FAILED test_it.py::test_first_loses_the_context" in said
    assert "RuntimeError: CUDA error: misaligned address" in said
    assert "these are my last words" in said
    assert "its process ended with exit code -6" in said
    assert "it has no such thing" in said
    first, second, *others = (tmp_path / "processes").read_text().split()
    assert first == second  # tests share a process
    assert len(others) == 5  # the two with parameters, and three that failed, again


def test_one_that_hangs_is_killed_and_the_next_is_run(tmp_path):
    said = run(tmp_path, HANGS, limit_s=2.0)
    assert "1 failed, 1 passed" in said, said
    assert "was killed after 2 s" in said


def test_without_a_device_no_process_is_started(tmp_path):
    said = run(tmp_path, TESTS.replace("os.abort()", "assert LOST"), has_device=False)
    assert "no report" not in said
    assert "4 failed" in said, said  # later tests find its context lost


def test_this_projects_tests_have_these_hooks():
    (conftest,) = [
        each for each in sys.modules.values() if getattr(each, "__file__", None) == str(ROOT / "tests" / "conftest.py")
    ]
    assert conftest.pytest_runtest_protocol is apart.pytest_runtest_protocol
    assert conftest.pytest_configure is apart.pytest_configure


@INSIDE_TORCH
def test_a_deprecation_inside_of_torch_fails_no_test_of_a_device():
    """Inductor's import of torch.jit once failed every test of flex_attention."""
    warnings.warn_explicit("`script_method` is deprecated", DeprecationWarning, "_script.py", 1, "torch.jit._script")
