"""docs/findings.md states the measured numbers and nothing else, and a finding that does not hold is not written."""

import importlib.util
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
DTYPES = ("float32", "float16")
CELLS = pd.DataFrame(
    {
        "implementation": ["fused", "fused", "sdpa"],
        "dtype": ["float32", "float16", "float32"],
        "latency_s": [2e-3, 8e-3, None],
        "latency_low_s": [1e-3, 7e-3, None],
        "latency_high_s": [3e-3, 9e-3, None],
        "status": ["ok", "ok", "error"],
        "message": ["", "", "out of luck"],
    }
)


@pytest.fixture(scope="module")
def findings():
    spec = importlib.util.spec_from_file_location("findings", ROOT / "docs" / "findings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kept(findings):
    return json.loads(findings.KEPT.read_text(encoding="utf-8"))


def test_the_page_is_what_is_kept(findings, kept):
    assert findings.PAGE.read_text(encoding="utf-8") == findings.page(kept), "run: python docs/findings.py page"


def test_ten_findings_hold_each_with_its_points_and_its_picture(findings, kept):
    assert list(kept) == list(findings.FINDINGS)
    assert len(kept) >= 10
    for name, finding in findings.FINDINGS.items():
        found = kept[name]
        assert list(found["points"]) == list(finding.points)
        for fact, told in finding.facts.items():
            quotient = found["points"][told.over]["value"] / found["points"][told.under]["value"]
            assert found["facts"][fact] == pytest.approx(quotient)
            assert quotient >= told.least
        assert any(fact.least > 0 for fact in finding.facts.values()), "it could not fail"
        assert re.search(r"torch \d.*\d{4}-\d\d-\d\d$", found["made"])
        with Image.open(findings.GALLERY / f"{name}.png") as picture:
            assert picture.width > 600


def test_each_finding_has_a_script_that_needs_no_attnbench(findings):
    for finding in findings.FINDINGS.values():
        name, _, argument = finding.repro.partition(" ")
        text = (ROOT / "examples" / "findings" / name).read_text(encoding="utf-8")
        assert "attnbench" not in text
        assert "\n    sys.exit(" in text or "\nsys.exit(" in text
        assert not argument or f'"{argument}": (' in text


def test_no_number_of_a_result_is_typed(findings):
    """Titles and causes contain results as facts only; other numbers are lengths, sizes and addresses."""
    for finding in findings.FINDINGS.values():
        assert re.findall(r"\b\d+(?:\.\d+)? (?:times|percent|%|ms|us)", finding.title + finding.cause) == []


def finding(findings, least):
    points = {each: findings.Point(run="run", implementation="fused", axes={"dtype": each}) for each in DTYPES}
    facts = {"times": findings.Fact(over="float16", under="float32", least=least)}
    return findings.msgspec.structs.replace(findings.FINDINGS["float16"], points=points, facts=facts)


def test_what_does_not_hold_is_refused(findings, monkeypatch):
    monkeypatch.setattr(findings, "_cells", lambda _: CELLS)
    measured = findings.measure(finding(findings, 3.0))
    assert measured["facts"] == {"times": 4.0}
    assert measured["points"]["float16"] == {"value": 8e-3, "low": 7e-3, "high": 9e-3}
    with pytest.raises(LookupError, match="does not hold here: times is 4"):
        findings.measure(finding(findings, 5.0))


def test_a_cell_without_a_number_is_refused_with_its_reason(findings):
    with pytest.raises(LookupError, match="out of luck"):
        findings._point(CELLS, findings.Point(run="run", implementation="sdpa"), "latency_s")
    with pytest.raises(LookupError, match="no latency_s"):
        findings._point(CELLS, findings.Point(run="run", implementation="fused"), "latency_s")
