"""Output files of a gate: formats for other programs, and hostile names without effect."""

import json
import re

import msgspec
import pytest

from attnbench.analysis.gate import outputs
from attnbench.analysis.gate.decision import judge
from attnbench.analysis.gate.rulings import Outcome
from attnbench.analysis.results import Results
from attnbench.storage.records import Status
from tests import journals
from tests.analysis.gate.scripts import ends, run, scales
from tests.analysis.gate.test_gate import attnbench

EVIL = journals.EVIL
NAMES = ("sdpa", "fused", EVIL)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    folder = tmp_path_factory.mktemp("runs")
    changes = (scales(EVIL, 1.4), ends(Status.crashed, "<img src=x onerror=alert(1)> | `x`\nsecond line"))
    return run(folder / "a", names=NAMES), run(folder / "b", *changes, names=NAMES)


@pytest.fixture
def decision(both):
    return judge(*both)


def test_the_summary_begins_with_the_verdict_and_folds_what_is_well(decision) -> None:
    text = outputs.markdown(decision)
    lines = text.splitlines()
    assert lines[0] == "## attnbench gate: fail: 1 failed, 2 slower, the suite as a whole"
    assert text.index("crashed") < text.index("<details>")
    assert text.count("<details>") == text.count("</details>") == 1
    rows = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {9}


def test_names_from_outside_have_no_effect(decision) -> None:
    text = outputs.markdown(decision)
    assert "<script>" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert "[b](" not in text


def test_a_long_table_is_cut_and_says_so(both) -> None:
    decision = judge(both[0], both[1])
    many = tuple(decision.of(Outcome.finding)) * 30
    text = outputs.markdown(msgspec.structs.replace(decision, rulings=many))
    assert f"and {len(many) - outputs.MOST_ROWS} more, in gate.json" in text
    assert len(text) < 65536


def test_the_command_writes_two_files(both, tmp_path, monkeypatch) -> None:
    code = attnbench(monkeypatch, "gate", both[0].folder, both[1].folder, "--to", tmp_path / "out")
    assert code == 1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"gate.md", "gate.json"}
    assert json.loads((tmp_path / "out" / "gate.json").read_text())["outcome"] == "finding"
    (tmp_path / "file").write_text("")
    assert attnbench(monkeypatch, "gate", both[0].folder, both[1].folder, "--to", tmp_path / "file") == 2


def test_a_terminal_reads_one_line_for_each_ruling_that_tells_something(both, monkeypatch, capsys) -> None:
    attnbench(monkeypatch, "gate", both[0].folder, both[1].folder)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    lines = printed.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["finding"] * 3
    assert lines[-2] == "base a at 1a2b3c4, candidate b at 1a2b3c4"
    assert lines[-1] == "fail: 1 failed, 2 slower, the suite as a whole"
