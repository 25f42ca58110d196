"""Triton's kernels are checked in its interpreter, without a GPU, and never timed there. Triton is no dependency."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from msgspec import structs
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.implementations.triton_flash import block
from attnbench.processes import execution
from attnbench.processes.planning import build_plan
from attnbench.storage.events import Plan
from attnbench.workloads.workload import Workload
from studies import ahead
from tests.checks import bundled

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "implementations" / "triton_flash.py"
RESCALE = "        acc = acc * alpha[:, None]\n"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def checked(spec: str, folder: Path, *settings: str) -> tuple[int, dict[str, object]]:
    """Return the exit code and the report of a check in the interpreter."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "attnbench", "check", spec, "--interpret", "--json", "--seed", "1", *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize(
    "settings",
    [
        ("seq_len=70", "num_heads=4", "num_kv_heads=2", "mask=causal"),
        ("seq_len=65", "num_heads=2", "num_kv_heads=1", "dtype=bfloat16,float16", "mask=none"),
        ("seq_len=33", "kv_len=70", "num_heads=1", "mask=none,causal,causal_bottom_right"),
        ("seq_len=70", "kv_len=33", "num_heads=1", "mask=causal_bottom_right", "dtype=bfloat16"),
        ("seq_len=33", "num_heads=1", "head_dim=20,256", "mask=causal"),
        ("seq_len=1", "num_heads=1", "mask=causal"),
    ],
    ids=" ".join,
)
def test_triton_flash_is_right_forward_and_backward(settings: tuple[str, ...], tmp_path: Path) -> None:
    small = () if any(each.startswith("head_dim") for each in settings) else ("head_dim=16",)
    code, report = checked("triton_flash", tmp_path, "direction=forward_backward", "batch_size=2", *small, *settings)
    assert (code, report["implementations"]["triton_flash"]["verdict"]) == (0, "right")


@pytest.mark.long
@needs_triton
def test_an_output_that_is_not_rescaled_is_named(tmp_path: Path) -> None:
    text = KERNELS.read_text(encoding="utf-8")
    assert text.count(RESCALE) == 1
    (tmp_path / "planted.py").write_text(text.replace(RESCALE, ""))
    settings = ("direction=inference", "mask=none", "seq_len=130", "num_heads=1", "head_dim=16", "batch_size=1")
    code, report = checked("planted.py:attention", tmp_path, *settings)
    assert code == 1
    assert "does not rescale its output when the maximum grows" in json.dumps(report)


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize("left_out", ["", " * rescale[:, None]"])
def test_the_kernel_of_the_document_is_right_and_its_mistake_is_named_as_there(left_out: str, tmp_path: Path) -> None:
    document = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n# file: my_triton.py\n(.*?)```", document, re.DOTALL)
    (said,) = re.findall(r'the check says: "It looks as if ([^"]+)"', document)
    (tmp_path / "my_triton.py").write_text(block.replace(f"result{left_out} +", "result +"))
    settings = ("direction=inference", "mask=none,causal", "seq_len=70", "num_heads=2", "head_dim=16")
    code, report = checked("my_triton.py:attention", tmp_path, *settings)
    assert code == bool(left_out)
    assert (" ".join(said.split()) in json.dumps(report)) is bool(left_out)


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize("dtype", ahead.DTYPES)
@pytest.mark.parametrize("width", ahead.WIDTHS[2:])
@pytest.mark.parametrize("kernel", ahead.KERNELS)
def test_each_kernel_fits_the_gpu_with_the_least_shared_memory(kernel: str, width: int, dtype: str) -> None:
    """float32 at K >= 128 once needed 214,016 bytes, and bfloat16 at K = 128 107,520; nothing said so."""
    cell = ahead.Cell(kernel, dtype, width, 89, is_causal=True)
    assert ahead.need(cell).fits(89)


def test_the_stored_table_is_of_these_kernels_and_none_needs_too_much() -> None:
    page = (ROOT / "results" / "gallery" / "gpu" / ahead.PAGE).read_text(encoding="utf-8")
    assert ahead.digest(KERNELS.read_text(encoding="utf-8")) in page, "run: nox -s triton"
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| flash_")]
    assert [row[1:3] for row in rows] == [
        [dtype, str(width)] for _ in ahead.KERNELS for dtype in ahead.DTYPES for width in ahead.WIDTHS
    ]
    for row in rows:
        query = torch.empty(1, 1, 1, int(row[2]), dtype=getattr(torch, row[1]), device="meta")
        assert int(row[3]) == block(query)
        for number, limit in zip(row[4:], ahead.LIMITS.values(), strict=True):
            assert int(number.strip("| ").replace(",", "")) <= limit


FAR = """
import torch
from attnbench.implementations.triton_flash import attention

step = 2**30 + 64  # of a batch row: the third begins beyond 2^31 numbers
memory = torch.empty(2 * step + 4096, dtype=torch.float16)
query, key, value = (memory[at:].as_strided((3, 1, 20, 16), (step, 320, 16, 1)) for at in (0, 1024, 2048))
draws = torch.Generator().manual_seed(0)
for tensor in (query, key, value):
    tensor.copy_(torch.randn(tensor.shape, generator=draws))
output = attention(query, key, value, 0.25, 1)
expected = torch.nn.functional.scaled_dot_product_attention(*(each.float() for each in (query, key, value)), scale=0.25)
torch.testing.assert_close(output.float(), expected, atol=2e-3, rtol=0.0)
"""


@pytest.mark.long
@needs_triton
def test_a_tensor_with_more_than_2_to_the_31_numbers_is_read_where_its_rows_are() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "harness"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", FAR], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_cuda_and_interpreter_it_says_how_to_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("attnbench.implementations.triton_flash.missing_package", lambda _: None)
    found = bundled()["triton_flash"]
    assert "check --interpret" in str(found.unsupported(Workload()))
    assert found.unsupported(Workload(device="cuda")) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert found.unsupported(Workload()) is None


def planned(**changes: object) -> Plan:
    made = build_plan(sweep="quick", settings=("seq_len=8",), is_exact=True, implementations=("sdpa",))
    return structs.replace(made, **changes)


def test_an_interpreter_is_never_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "Triton's interpreter does not show the speed"
    with pytest.raises(ValueError, match=refused):
        execution.execute(planned(is_interpreted=True), tmp_path, lambda _: None)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=refused):
        execution.execute(planned(), tmp_path, lambda _: None)


def test_the_worker_is_told_by_its_environment(tmp_path: Path) -> None:
    for is_interpreted in (True, False):
        client = execution.client_for(planned(is_interpreted=is_interpreted), tmp_path)
        assert ("TRITON_INTERPRET" in client.template.environment) == is_interpreted


def test_without_triton_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbench.commands.check.find_spec", lambda _: None)
    answer = CliRunner().invoke(app, ["check", "sdpa", "--interpret"])
    assert "pip install triton" in f"{answer.output} {answer.exception}"


def test_no_other_implementation_has_kernels_of_triton() -> None:
    files = sorted((ROOT / "implementations").glob("*.py"))
    assert [file.name for file in files if "from triton" in file.read_text(encoding="utf-8")] == [KERNELS.name]
