"""Devices: one file each; other folders know none by name, and only measuring needs torch.

Nobody has run some of them, and some systems: their functions exist, the first line says what works, nothing is traced.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import torch.mps
import torch.xpu

from attnbench import devices
from attnbench.commands import list as catalog
from attnbench.contract import is_on, only_on
from attnbench.devices import cuda, device, mps, platforms, xpu
from attnbench.devices.recording import Footprint
from attnbench.processes.planning import build_plan
from attnbench.workloads.workload import Workload

ROOT = Path(__file__).parent.parent.parent
OUTSIDE = [
    file
    for folder in ("harness/attnbench", "implementations")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if not {"devices", "__pycache__"} & set(file.relative_to(ROOT).parts)
]


def knows_a_device(node: ast.AST) -> bool:
    """Whether code compares a text with a device's name, or uses torch.cuda."""
    match node:
        case ast.Import() | ast.ImportFrom():
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            return any(re.search(r"torch\.(\w+\.)*cuda\b", name) for name in names)
        case ast.Attribute():
            return node.attr in {"cuda", "is_cuda"}
        case ast.Compare() | ast.MatchValue() | ast.Call(func=ast.Attribute(attr="startswith" | "fullmatch" | "match")):
            texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            return bool({str(text).partition(":")[0] for text in texts} & set(devices.names()))
    return False


def test_nothing_outside_asks_for_a_device_by_name():
    assert len(OUTSIDE) > 100
    reported = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in OUTSIDE
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if knows_a_device(node)
    ]
    assert not reported, f"a fact of one device belongs into its file: {reported}"


def test_a_device_is_made_once_and_named_as_the_workload_names_it():
    assert {"cpu", "cuda"} <= set(devices.names())
    assert device("cuda:1") is device("cuda:1")
    assert (device("cuda:1").name, device("cuda:1").torch_device) == ("cuda:1", "cuda:1")


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ("cudaa", "there is no device cudaa (did you mean cuda?); choose among cpu, cuda, mps, xpu"),
        ("tpu:1", "there is no device tpu"),
        ("cpu:1", "device=cpu:1 is not allowed: there is one cpu; give no number"),
        ("mps:1", "device=mps:1 is not allowed: there is one mps; give no number"),
        ("Cuda", "device=Cuda is not allowed: device is NAME or NAME:N"),
    ],
)
def test_a_device_that_there_is_not_is_refused_when_a_plan_is_made(given, reported):
    with pytest.raises(ValueError, match=re.escape(reported)):
        build_plan(sweep="quick", settings=[f"device={given}"])


def test_all_stands_for_what_seems_to_be_here(monkeypatch):
    for is_here in (True, False):
        monkeypatch.setattr("attnbench.devices.cuda.Cuda.seems_present", lambda _, it=is_here: it)
        plan = build_plan(sweep="quick", settings=["device=all"])
        assert {workload.device for workload in plan.workloads} == {"cpu", *(["cuda"] * is_here)}


def test_a_kernel_that_has_one_kind_of_device_says_so():
    assert only_on("cuda", Workload(), "the kernel") == "the kernel runs only on CUDA"
    assert only_on("cuda", Workload(device="cuda:1"), "the kernel") is None
    assert is_on("cpu", Workload())


WITHOUT_TORCH = """
import sys

sys.modules["torch"] = None  # an import of it fails
from attnbench.commands import list as catalog
from attnbench.devices import device, names
from attnbench.processes.planning import build_plan

for name in names():
    found = device(name)
    print(found.name, found.torch_device, found.is_host, found.seems_present())
    print(found.missing_compiler())
print(len(build_plan(sweep="quick", settings=["device=cuda"]).workloads), catalog.entries("axes"))
"""


def test_devices_are_listed_and_planned_for_where_torch_is_missing():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, capture_output=True)


def test_the_columns_of_devices_are_those_that_there_are():
    tried = {name for name in devices.names() if not device(name).untried}
    assert set(catalog.QUESTIONS) >= tried - {Workload().device}
    assert set(catalog.QUESTIONS).isdisjoint({"mps", "xpu"})
    assert all(msgspec.json.decode(msgspec.json.encode(axes)) == axes for axes in catalog.QUESTIONS.values())


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
    assert found == Footprint(peak_bytes=80, kept_bytes=15, result_bytes=12)


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
    path = os.pathsep.join([str(folder), str(ROOT / "harness")])
    place = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": path}, "timeout": 600}
    command = [sys.executable, "-m", "attnbench", *arguments]
    return subprocess.run(command, **place, capture_output=True, text=True, check=False)


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
