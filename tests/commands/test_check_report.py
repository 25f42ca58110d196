"""`attnbench check --report FILE`: one small file with the verdicts by device and dtype, and what they hold for."""

import json

import pytest
import torch
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.processes.planning import build_plan
from attnbench.reports import stock

MINE = """
def mistaken(query, key, value, mask):
    return (query @ key.mT).softmax(-1) @ value
"""
SHAPE = ("--set", "seq_len=16", "--set", "scope=attention", "--set", "dtype=float32,bfloat16", "--set", "mask=causal")


@pytest.mark.usefixtures("forked_workers")
def test_a_report_has_verdicts_by_dtype_with_errors_findings_and_versions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("stock.json", "stock.md"):
        done = CliRunner().invoke(app, ["check", "sdpa", "sdpa_cudnn", "mine.py:mistaken", "--report", name, *SHAPE])
        assert done.exit_code == 1, done.output
    found = json.loads((tmp_path / "stock.json").read_text())
    verdicts = found["verdicts"]
    assert verdicts["sdpa"].keys() == {"cpu float32", "cpu bfloat16"}
    assert all(text.startswith("right on 1 of 1, error 0.") for text in verdicts["sdpa"].values())
    assert "CUDA" in verdicts["sdpa_cudnn"]["cpu float32"]
    assert verdicts["mistaken"]["cpu float32"].startswith("WRONG")
    assert {each["implementation"] for each in found["findings"]} == {"mistaken"}
    assert f"torch {torch.__version__}" in found["facts"]["versions"]
    text = (tmp_path / "stock.md").read_text()
    assert "| sdpa | right on 1 of 1, error 0." in text
    assert "**mistaken**, disagrees on" in text


@pytest.mark.parametrize(
    "wrong", [["--report", "stock.txt"], ["--report", "no/stock.md"], ["--report", "a.md", "--invariance"]]
)
def test_a_report_that_cannot_be_written_is_refused_at_once(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "sdpa", *wrong])
    assert isinstance(done.exception, ValueError | SystemExit)
    assert "--report" in str(done.exception) + done.output


def test_alone_it_is_about_pytorchs_own_attention_in_every_dtype():
    plan = build_plan(sweep="stock")
    assert {workload.dtype for workload in plan.workloads} == {"float32", "bfloat16", "float16"}
    assert {"sdpa_flash", "torch_mha", "flex", "sdpa+compile"} <= set(plan.implementations)


@pytest.mark.usefixtures("forked_workers")
def test_reports_in_either_form_are_set_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("one.json", "two.md"):
        CliRunner().invoke(app, ["check", "sdpa", "mine.py:mistaken", "--report", name, *SHAPE, "--seed", "0"])
    found = [stock.load(tmp_path / name) for name in ("one.json", "two.md")]
    assert found[0] == found[1]
    done = CliRunner().invoke(app, ["report", "one.json", "two.md"])
    assert done.output.strip() == "4 of 4 verdicts are the same in all 2, errors included."
    other = json.loads((tmp_path / "one.json").read_text())
    other["verdicts"]["sdpa"]["cpu float32"] = "WRONG on 1 of 1"
    del other["verdicts"]["mistaken"]
    (tmp_path / "two.json").write_text(json.dumps(other))
    lines = CliRunner().invoke(app, ["report", "one.json", "two.json"]).output.splitlines()
    assert lines[0] == "| | one | two |"
    assert any(line.startswith("| sdpa, cpu float32 | right on 1 of 1") for line in lines)
    assert sum(line.endswith(" | - |") for line in lines) == 2
    assert "1 of 4 verdicts are the same" in lines[-1]
    (tmp_path / "no.json").write_text("{}")
    assert "no.json was not written by" in str(CliRunner().invoke(app, ["report", "no.json"]).exception)
