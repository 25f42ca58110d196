"""Devices and systems that nobody has run: their functions exist, the first line says what works, nothing is traced."""

import inspect
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.mps
import torch.xpu

from attnbench.devices import cuda, device, mps, platforms, xpu
from attnbench.devices.recording import Footprint

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("kind", "module"), [(mps, torch.mps), (xpu, torch.xpu)])
def test_every_function_that_a_device_calls_is_in_torch(kind, module):
    methods = [each for each in map(partial(getattr, kind.DEVICE), dir(kind.DEVICE)) if inspect.isfunction(each)]
    called = set(re.findall(r"self\.module\.(\w+)", "".join(map(inspect.getsource, methods))))
    assert len(called) > 4
    assert {name for name in called if not hasattr(module, name)} == set()
    assert hasattr(module.Event, "elapsed_time")


@pytest.mark.parametrize("name", ["mps", "xpu", "xpu:1"])
def test_an_untried_device_that_is_not_here_is_named(name):
    assert device(name).missing() == f"this machine has no device {name}"
    assert "oracle" in device(name).untried
    assert device(name).facts().accelerator == ""
    assert device(name).generators() == {}
    assert not device(name).seems_present()


def test_a_mac_has_a_device_and_its_memory_is_that_of_heaps(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    here = mps.Mps("mps")
    assert here.seems_present()
    readings = iter((10, 100, 25, 180))
    for name in ("current_allocated_memory", "driver_allocated_memory"):
        monkeypatch.setattr(torch.mps, name, lambda: next(readings))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.mps, name, lambda: None)
    found = here.record(lambda: torch.ones(3)).footprint()
    assert found == Footprint(
        peak_bytes=80, kept_bytes=15, result_bytes=12, num_allocations=0, allocated_bytes=15, reserved_bytes=80
    )


def test_a_gpu_of_amds_is_untried_and_has_no_compute_capability(monkeypatch, tmp_path):
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(cuda, "AMD_DRIVER", tmp_path / "kfd")
    monkeypatch.setattr(cuda, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    here = cuda.Cuda("cuda")
    assert here.seems_present()
    assert "AMD" in here.untried
    assert here.compute_capability() is None
    monkeypatch.setattr(cuda, "DRIVER", tmp_path / "kfd")  # a machine with both
    assert here.untried == ""


FAKED = """
import os, platform, sys, sysconfig
import psutil, torch

sysconfig.get_config_vars()  # read from files of this system

for name in ("fork", "forkpty", "memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity"):
    delattr(os, name)
sys.platform = "darwin"
platform.system = lambda: "Darwin"
"""
"""A Mac, as far as Python code can see it once the compiled parts of other packages are imported."""
WINDOWS = """
import platform, sys
import typer

sys.platform = "win32"
sys.modules["fcntl"] = sys.modules["resource"] = None
platform.system = lambda: "Windows"
"""
SMALL = ("--set=seq_len=8", "--set=num_heads=1", "--set=scope=attention", "--set=mask=none")


def run(folder: Path, faked: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "sitecustomize.py").write_text(faked)
    return subprocess.run(
        [sys.executable, "-m", "attnbench", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "harness")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (("check", "sdpa", *SMALL), {0}),
        (("run", "sdpa", "fused", *SMALL, "--budget=1"), {0, 1, 3}),
        (("doctor",), {0, 1}),
        (("check", "sdpa", "--set=device=mps", *SMALL), {3}),
    ],
)
def test_on_a_mac_the_first_line_says_what_works_and_there_is_no_traceback(arguments, codes, tmp_path):
    done = run(tmp_path, FAKED, *arguments)
    said = done.stdout + done.stderr
    assert done.returncode in codes, said
    assert done.stderr.startswith("Darwin: untried. check: ")
    assert "Traceback" not in said
    if "--set=device=mps" in arguments:
        assert "\nmps: untried. answers are compared" in done.stderr
        assert "this machine has no device mps" in done.stdout


@pytest.mark.parametrize("command", [["check", "sdpa"], ["--help"]])
def test_on_windows_one_line_says_that_nothing_works(command, tmp_path):
    done = run(tmp_path, WINDOWS, *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [platforms.NOTHING.format("Windows", "fcntl and no resource")]


def test_on_linux_nothing_is_said(monkeypatch):
    assert platforms.first_line() == ""
    monkeypatch.setattr("platform.system", lambda: "FreeBSD")
    assert platforms.first_line().startswith("FreeBSD: untried")
