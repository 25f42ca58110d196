"""Output files of a gate: formats for other programs, and hostile names without effect."""

import json

import msgspec
import pytest

from attnbench.analysis.gate import outputs
from attnbench.analysis.gate.decision import judge
from attnbench.analysis.results import Results
from attnbench.storage.records import Status
from tests import journals
from tests.analysis.gate.scripts import ends, findings, run, scales
from tests.analysis.gate.test_gate import attnbench

EVIL = journals.EVIL
NAMES = ("sdpa", "fused", EVIL)
HEADLINE = "fail: 1 failed, 2 slower."


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    folder = tmp_path_factory.mktemp("runs")
    changes = (scales(EVIL, 1.4), ends(Status.crashed, "<img src=x onerror=alert(1)> | `x`\nsecond line"))
    return run(folder / "a", names=NAMES), run(folder / "b", *changes, names=NAMES)


def test_the_summary_begins_with_the_verdict_and_names_from_outside_have_no_effect(both) -> None:
    decision = judge(*both)
    text = outputs.markdown(decision)
    heading, _, *lines = text.splitlines()
    assert heading == f"## attnbench gate: {HEADLINE}"
    assert [line.startswith("- fail: ") for line in lines[:4]] == [True, True, True, False]
    assert "crashed" in text
    for part in ("<script>", "<img", "\x1b", "[b]("):
        assert part not in text
    many = tuple(findings(decision)) * 60
    cut = outputs.markdown(msgspec.structs.replace(decision, rulings=many))
    assert "more, in gate.json" in cut
    assert len(cut) < 65536


def test_the_command_writes_two_files_and_prints_a_line_for_each_finding(both, tmp_path, monkeypatch, capsys) -> None:
    code = attnbench(monkeypatch, "gate", both[0].folder, both[1].folder, "--to", tmp_path / "out")
    assert code == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gate.md", "gate.json"}
    assert json.loads((tmp_path / "out" / "gate.json").read_text())["ending"] == "fail"
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    *lines, context, headline = printed.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["fail"] * 3
    assert (context, headline) == ("base a at 1a2b3c4, candidate b at 1a2b3c4", HEADLINE)
    (tmp_path / "file").write_text("")
    assert attnbench(monkeypatch, "gate", both[0].folder, both[1].folder, "--to", tmp_path / "file") == 2
