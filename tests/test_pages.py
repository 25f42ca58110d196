"""Pages made by a program show what it makes now: figures, findings, the first hour, the field, and the site."""

import importlib.util
import json
import math
import re
import shutil
from functools import cache
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from attnbench import plugins
from attnbench.analysis.results import read
from attnbench.explained import explanations
from attnbench.reports import plotted_metrics
from attnbench.statistics.verdict import Effect, judge
from attnbench.storage.records import Status, Verdict

ROOT = Path(__file__).parents[1]
FIELD = ROOT / "examples" / "field"
DTYPES = ("float32", "float16")
CELLS = pd.DataFrame(
    [
        ("fused", "float32", 2e-3, 1e-3, 3e-3, "ok", ""),
        ("fused", "float16", 8e-3, 7e-3, 9e-3, "ok", ""),
        ("sdpa", "float32", None, None, None, "error", "out of luck"),
    ],
    columns=["implementation", "dtype", "latency_s", "latency_low_s", "latency_high_s", "status", "message"],
)


@cache
def program(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"program_{Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "name", "make"), [("docs/trust.md", "trust", "tried"), ("docs/fastest.md", "policy", "followed")]
)
def test_a_page_shows_the_figures_of_its_gallery(page, name, make):
    figures = program("docs/figures.py")
    text = text_of(page)
    assert text == figures.renewed(text, {name: getattr(figures, make)()}), "run: python docs/figures.py"


def test_the_method_works_its_example_out_as_the_code_does():
    text = text_of("docs/method.md")
    seen = Effect(log=0.03, error=0.014 / 8**0.5, degrees=7, num_processes=8, num_measured=8)
    null = Effect(log=0.0, error=0.005, degrees=7, num_processes=8, num_measured=8)
    alone = judge({0: seen})[0]
    among = judge({place: null if place else seen for place in range(64)})[0]
    for judged, level in ((alone, "1 %"), (among, "0.016 %")):
        low, high = (100 * (judged.effect.log + sign * judged.half_width) for sign in (-1, 1))
        assert f"level of {level}" in text or f"level is {level}" in text
        assert f"{100 * judged.level:.2g} %" == level
        assert f"{low:.1f} to {high:.1f} %" in text
        assert f"{judged.half_width / seen.error:.3g}"[:3] in text
    assert (alone.verdict, among.verdict) == (Verdict.slower, Verdict.undecided)


def test_the_method_states_the_share_of_false_verdicts_in_simulations():
    page = text_of("results/gallery/acceptance/acceptance.md")
    (row,) = (line for line in page.splitlines() if line.startswith("| V2 ") and "without any difference" in line)
    (most,) = re.findall(r"of 10000, 99 % limit ([\d.]+)%", row)
    rounded_up = math.ceil(10 * float(most)) / 10
    assert f"at most {rounded_up} % of sessions" in text_of("docs/method.md")


def test_the_gallery_has_its_page_and_its_pictures():
    figures = program("docs/figures.py")
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page(), "run: python docs/figures.py"
    shown = re.findall(r"\]\(([^)]+)\)", figures.page())
    assert len(shown) > len(figures.RUNS) + len(figures.OTHERS)
    assert all((figures.GALLERY / name).exists() for name in shown)
    of_readme = [part.split(")")[0] for part in text_of("README.md").split("](results/")[1:]]
    assert of_readme
    assert all((ROOT / "results" / name).exists() for name in of_readme)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), dtype=float)


def test_the_gallery_can_be_drawn_again_from_its_journal(tmp_path):
    figures = program("docs/figures.py")
    (again,) = plotted_metrics.REPORT["picture"].write(read(figures.QUICK), tmp_path)
    figures.shrink(again)
    kept = pixels(figures.QUICK / "picture.png")
    redrawn = pixels(again)
    assert redrawn.shape == kept.shape, "run: python docs/figures.py quick"
    assert np.abs(redrawn - kept).mean() < 5, "run: python docs/figures.py quick"


def test_the_gallery_is_small_and_reduced_already(tmp_path):
    figures = program("docs/figures.py")
    shutil.copytree(figures.GALLERY, tmp_path / "gallery")
    figures.reduce(tmp_path / "gallery")
    before, after = (
        {
            path.relative_to(top): path.read_bytes()
            for path in top.rglob("*")
            if path.is_file() and "parts" not in path.parts
        }
        for top in (figures.GALLERY, tmp_path / "gallery")
    )
    # names alone: otherwise pytest compares pictures byte by byte
    assert not [path for path in before | after if before.get(path) != after.get(path)], "run: python docs/figures.py"
    assert sum(map(len, before.values())) < 4.5e6


def test_ten_findings_hold_each_with_its_points_and_its_picture():
    findings = program("docs/findings.py")
    kept = json.loads(findings.KEPT.read_text(encoding="utf-8"))
    assert findings.PAGE.read_text(encoding="utf-8") == findings.page(kept), "run: python docs/findings.py page"
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


def test_each_finding_has_a_script_that_needs_no_attnbench_and_no_typed_result():
    """Titles and causes contain results as facts only; other numbers are lengths, sizes and addresses."""
    for finding in program("docs/findings.py").FINDINGS.values():
        name, _, argument = finding.repro.partition(" ")
        text = text_of(f"examples/findings/{name}")
        assert "attnbench" not in text
        assert "\n    sys.exit(" in text or "\nsys.exit(" in text
        assert not argument or f'"{argument}": (' in text
        assert re.findall(r"\b\d+(?:\.\d+)? (?:times|percent|%|ms|us)", finding.title + finding.cause) == []


def test_a_finding_that_does_not_hold_is_refused(monkeypatch):
    findings = program("docs/findings.py")
    monkeypatch.setattr(findings, "_cells", lambda _: CELLS)
    points = {each: findings.Point(run="run", implementation="fused", axes={"dtype": each}) for each in DTYPES}

    def measured(least):
        facts = {"times": findings.Fact(over="float16", under="float32", least=least)}
        return findings.measure(msgspec.structs.replace(findings.FINDINGS["float16"], points=points, facts=facts))

    assert measured(3.0)["facts"] == {"times": 4.0}
    assert measured(3.0)["points"]["float16"] == {"value": 8e-3, "low": 7e-3, "high": 9e-3}
    with pytest.raises(LookupError, match="does not hold here: times is 4"):
        measured(5.0)


def test_each_question_is_answered_by_its_own_command_in_time():
    hour = program("docs/first_hour.py")
    page = hour.PAGE.read_text(encoding="utf-8")
    assert "Made on 20" in page
    for number, question in enumerate(hour.QUESTIONS, 1):
        begin, end = page.index(f"<!-- begin {number} -->"), page.index(f"<!-- end {number} -->")
        assert f"## {number}. {question.text}" in page[:begin]
        block = page[begin:end]
        assert f"$ {question.command}\n" in block
        took = re.search(r"It took (\d+) s", block)
        assert took, f"{number} is not answered: python docs/first_hour.py {number}"
        assert question.is_sweep or int(took[1]) <= 60


def test_the_readme_is_short_and_shows_what_its_commands_print():
    hour = program("docs/first_hour.py")
    text = hour.README.read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    for name, question in hour.SHOWN.items():
        block = text[text.index(f"<!-- begin {name} -->") : text.index(f"<!-- end {name} -->")]
        assert f"$ {question.command}\n" in block, "run: python docs/first_hour.py readme"
        assert len(block.splitlines()) > 8


def test_the_readme_shows_what_was_measured_on_a_gpu():
    gpu = text_of("README.md").partition("## Does it work on my GPU?")[2].partition("\n## ")[0]
    shown = re.findall(r"```text\n(.*?)```", gpu, re.DOTALL)
    assert len(shown) == 1
    assert shown[0] in text_of("results/gallery/gpu/README.md")
    assert "](docs/cuda.md)" in gpu


def test_each_file_of_the_field_holds_one_implementation_of_a_package_with_a_version():
    check = program("examples/field/check.py")
    assert {name: plugins.discover_implementations(FIELD / f"{name}.py") for name in check.ENTRIES} == {
        name: [name] for name in check.ENTRIES
    }
    others = {"check", "cpu_torchvision", "from_monai", "from_transformers"}
    assert {file.stem for file in FIELD.glob("*.py")} - others == set(check.ENTRIES)
    pinned = set(re.findall(r"^([\w-]+)==", text_of("examples/field/requirements.txt"), re.MULTILINE))
    assert {entry["package"] for entry in check.ENTRIES.values()} <= pinned
    assert check.num_lines('import a\n\nfrom b import (\n    c,\n)\n\n# why\nx = """\n\ny"""\n') == 3


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    site = program("docs/site.py")
    site.PAGES = tmp_path_factory.mktemp("site") / "pages"
    site.stage()
    return site.PAGES


def test_every_document_is_in_the_navigation():
    """The session `docs` fails for a page in it that is missing, and for a broken link."""
    navigation = re.findall(r"^ +- (?:[^:]+: )?(\S+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(navigation)


def headings(*names: str) -> list[str]:
    return [f"## {name}\n" for name in names]


REFERENCE = {
    "commands": [
        *headings(*(f"attnbench {name}" for name in plugins.plugs("attnbench.commands", "COMMAND"))),
        *("--budget", "| 3 | inconclusive"),
    ],
    "journal": [
        *headings("RunStarted", "CellChecked", "VisitFinished", "Plan", "Workload", "Status"),
        *(f"`{status}`" for status in Status),
    ],
    "verdict": headings("Report", "Implementation", "CellVerdict", "Speed", "Choice", "Next"),
}


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_has_every_part(pages, page):
    text = (pages / "reference" / f"{page}.md").read_text(encoding="utf-8")
    assert [part for part in REFERENCE[page] if part not in text] == []


def test_each_word_is_explained_on_the_page_of_its_kind(pages):
    for each in explanations():
        text = (pages / "reference" / "words" / f"{each.kind}.md").read_text(encoding="utf-8")
        (entry,) = (entry for entry in text.split("\n## ") if entry.startswith(f"`{each.name}` {{#"))
        assert [part for part in (each.means, each.why, each.example, each.do) if part not in entry] == []
