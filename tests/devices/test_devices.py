"""Devices: one file each; other folders know none by name, and only measuring needs torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from attnbench import devices
from attnbench.commands import list as catalog
from attnbench.contract import is_on, only_on
from attnbench.devices import device
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
    assert only_on("cuda", Workload(), "the kernel") == "the kernel runs on CUDA alone"
    assert only_on("cuda", Workload(device="cuda:1"), "the kernel") is None
    assert is_on("cpu", Workload())


WITHOUT_TORCH = """
import sys

sys.modules["torch"] = None  # an import of it fails
from attnbench.commands import list as catalog
from attnbench.devices import device, names
from attnbench.processes.planning import build_plan
from attnbench.workloads.workload import Workload

for name in names():
    found = device(name)
    found.notes(Workload(device=name, dtype="bfloat16"), None)
    print(found.name, found.torch_device, found.is_host, found.seems_present(), found.has_caching_allocator)
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
