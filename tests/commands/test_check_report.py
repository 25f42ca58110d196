"""`attnbench check --report FILE`: one small file with the verdicts by device and dtype, and what they hold for."""

import re

import pytest
import torch
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.commands import running

MINE = """
def mistaken(query, key, value, mask):
    return (query @ key.mT).softmax(-1) @ value
"""
SHAPE = ("--set", "seq_len=16", "--set", "scope=attention", "--set", "dtype=float32,bfloat16", "--set", "mask=causal")


@pytest.mark.usefixtures("forked_workers")
def test_a_report_has_verdicts_by_dtype_with_errors_findings_and_versions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    done = CliRunner().invoke(app, ["check", "sdpa", "sdpa_cudnn", "mine.py:mistaken", "--report", "stock.md", *SHAPE])
    assert done.exit_code == 1, done.output
    text = (tmp_path / "stock.md").read_text()
    for dtype in ("float32", "bfloat16"):
        assert f"- **sdpa, cpu {dtype}**: right on 1 of 1, error 0." in text
    assert re.search(r"sdpa\\?_cudnn, cpu float32\*\*: .*CUDA", text)
    assert re.search(r"\*\*mistaken on \S+\*\*: disagrees: ", text)
    assert f"torch {torch.__version__}" in text


@pytest.mark.parametrize(
    "wrong", [["--report", "stock.txt"], ["--report", "no/stock.md"], ["--report", "a.md", "--invariance"]]
)
def test_a_report_that_cannot_be_written_is_refused_at_once(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "sdpa", *wrong])
    assert isinstance(done.exception, ValueError | SystemExit)
    assert "--report" in str(done.exception) + done.output


def test_alone_or_with_a_device_it_is_about_pytorchs_own_attention_in_every_dtype(tmp_path, monkeypatch):
    plans = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "execute", lambda planned, *_, **__: plans.append(planned))
    for more in ([], ["--set", "device=cpu"]):
        CliRunner().invoke(app, ["check", "--report", "stock.md", *more])
    plan, on_cpu = plans
    assert on_cpu.workloads == tuple(each for each in plan.workloads if each.device == "cpu")
    assert {workload.dtype for workload in plan.workloads} == {"float32", "bfloat16", "float16"}
    assert {"sdpa_flash", "torch_mha", "flex", "sdpa+compile"} <= set(plan.implementations)


STORED = """# Stock attention on this machine

- **versions**: torch 2.13.0 \\[cpu\\]

## Verdicts

- **sdpa, cpu float32**: right on 1 of 1
- **sdpa, cpu bfloat16**: right
- **flex, cpu float32**: needs a \\| more
- **flex, cpu bfloat16**: nothing was tried

## Findings

No findings.
"""


def test_reports_are_set_side_by_side(tmp_path):
    other = STORED.replace("2.13.0", "2.14.1").replace("right on 1 of 1", "WRONG on 1 of 1")
    finding = "- **sdpa on w**: off"
    files = {"one.md": STORED, "two.md": other.replace("No findings.", finding)}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    lines = CliRunner().invoke(app, ["report", *(str(tmp_path / name) for name in files)]).output.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0] == ["", "one", "two"]
    assert rows[2][0] == "versions"
    assert rows[3:] == [["sdpa, cpu float32", "right on 1 of 1", "WRONG on 1 of 1"], ["sdpa on w", "-", "off"]]
    assert lines[-1] == "3 of 4 verdicts agree in all files, errors included."
    (tmp_path / "other").mkdir()
    (tmp_path / "two.md").rename(tmp_path / "other" / "one.md")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "one.md"), str(tmp_path / "other" / "one.md")])
    assert "3 of 4 verdicts" in done.output  # of one name, none replaces the other
    (tmp_path / "no.md").write_text("# Another")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "no.md")])
    assert "was not written by attnbench check --report" in str(done.exception)
