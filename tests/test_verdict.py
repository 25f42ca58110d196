"""What --json prints: one schema for four commands, and never a time on a wrong answer."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from attnbench.analysis.conclusion import Conclusion, Ending
from attnbench.analysis.gate.certain import changed
from attnbench.explained import explained
from attnbench.reports import verdict
from attnbench.storage.records import BASE, CANDIDATE, Status
from tests import journals

ROOT = Path(__file__).parents[1]
END = Conclusion(ending=Ending.passed, words="right")


def test_the_generated_documents_are_up_to_date():
    """The schema of --json, and the frozen command line: a command or an option that appears or goes shows here."""
    for path, text in runpy.run_path(str(ROOT / "docs" / "reference.py"))["documents"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} differs: run python docs/reference.py"


@pytest.fixture
def results(tmp_path):
    points = journals.workloads(mask=("causal",), seq_len=(128, 512), scope=("attention",))
    return journals.write(tmp_path, points, ("sdpa", "fused", "liar"))


def test_a_wrong_answer_has_no_time_and_a_right_one_has_both(results):
    found = verdict.report(results, END, 0, ["run", "fused", "--set", "mask=causal"])
    assert found.implementations["liar"].verdict == "WRONG"
    assert not found.implementations["liar"].is_right
    assert found.implementations["liar"].speed is None
    wrong = [cell for cell in found.cells if cell.verdict == "WRONG"]
    assert wrong
    assert [cell.seconds for cell in wrong] == [None] * len(wrong)
    assert [cell.speed for cell in wrong] == [None] * len(wrong)
    right = found.implementations["fused"]
    assert right.is_right
    assert right.speed is not None
    assert right.speed.low <= right.speed.speedup <= right.speed.high
    assert all(cell.seconds > 0 for cell in found.cells if cell.implementation == "fused")
    assert [choice.workload for choice in found.choices] == [workload.id for workload in results.plan.workloads]
    (command,) = (step.command for step in found.next if "--repro" in step.command)
    assert command == "attnbench check liar --set mask=causal --repro repro"
    for warning in (*found.warnings, *(each for cell in found.cells for each in cell.warnings)):
        assert explained(warning.name)


def test_a_report_is_what_its_schema_says(results):
    found = verdict.report(results, END, 0, ["run"])
    document = msgspec.json.encode(found)
    assert msgspec.json.decode(document, type=verdict.Report) == found
    assert json.loads(document)["schema"] == verdict.SCHEMA


def test_what_changed_in_results_is_said(tmp_path):
    results = journals.write(tmp_path, journals.workloads(seq_len=(128,), scope=("attention",)), ("sdpa",))
    (record,) = results.records
    agreement = msgspec.structs.replace(record.agreement, probes=record.agreement.probes[:1])
    before = msgspec.structs.replace(record, side=BASE)

    def differences(**fields):
        return changed(SimpleNamespace(records=(before, msgspec.structs.replace(record, side=CANDIDATE, **fields))))

    (line,) = differences(agreement=agreement)
    assert line.startswith(f"sdpa on {record.workload.id}: error_ratio ")
    assert differences() == []
    failed = differences(status=Status.error, operators=None, measurements=(), agreement=None)
    assert failed == [f"sdpa on {record.workload.id}: status ok, now error"]


def test_the_page_for_agents_has_60_lines():
    """tests/test_documents.py runs every command in it."""
    assert len((ROOT / "docs" / "agents.md").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.long
def test_an_agents_loop_ends_in_four_decisions():
    loop = runpy.run_path(str(ROOT / "examples" / "agent_loop.py"))
    found = loop["main"](4.0)
    decisions = {name: chosen for name, (_, chosen) in found.items()}
    assert decisions["wrong"] == "reject: softmax_over_queries"
    assert decisions["cheat"] == "reject: it returns an earlier answer"
    assert decisions["slow"] in {"keep the one before", "measure longer"}
    assert decisions["fast"] in {"take it", "measure longer"}
    for name, (seen, _) in found.items():
        assert seen["implementations"][name]["is_right"] is (name in {"slow", "fast"})
        msgspec.convert(seen, verdict.Report)
