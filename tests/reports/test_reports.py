"""Reports of a made-up run: complete, escaped, reproducible, and honest about gaps."""

import csv
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.analysis.results import Results
from attnbench.plugins import plugs
from attnbench.reports import Report, answers, cells, explorer, pytest_benchmark, summary
from attnbench.units import escaped, guarded, sanitize_line
from tests import journals
from tools import vega

SCRIPT = re.compile(r"<script[^>]*>.*?</script>", re.DOTALL)
LOADS = re.compile(r"""\s(?:src|href|xlink:href|action|data)=["']([^"']*)""")
REPORTS: dict[str, Report] = plugs("attnbench.reports", "REPORT")
POINTS = journals.workloads(scope=("attention", "module"), mask=("none", "causal"), seq_len=(128, 2048))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return journals.write(tmp_path_factory.mktemp("run"), POINTS)


@pytest.fixture(scope="module")
def written(results: Results, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    folder = tmp_path_factory.mktemp("reports")
    return {name: report.write(results, folder) for name, report in REPORTS.items()}


@pytest.fixture(scope="module")
def whole(written: dict[str, list[Path]]) -> str:
    return written["html"][0].read_text()


@pytest.fixture(scope="module")
def page(whole: str) -> str:
    """Return the page without its scripts."""
    return SCRIPT.sub("", whole)


@pytest.fixture(scope="module")
def explored(whole: str) -> dict[str, Any]:
    """Return the data of the page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', whole, re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def markdown(written: dict[str, list[Path]]) -> str:
    return written["markdown"][0].read_text()


def test_every_promised_report_is_there() -> None:
    usual = {"csv", "html", "markdown", "picture"}
    plots = {"latency_plot", "ratio_plot", "memory_plot"}
    assert {name for name, report in REPORTS.items() if report.is_usual} >= usual
    assert {name for name, report in REPORTS.items() if not report.is_usual} == {*plots, "pytest-benchmark"}
    assert all(report.summary for report in REPORTS.values())


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_a_report_writes_what_it_says_into_the_folder(name: str, written: dict[str, list[Path]]) -> None:
    assert written[name]
    assert len({path.parent for paths in written.values() for path in paths}) == 1
    assert all(path.stat().st_size > 100 for path in written[name])


@pytest.mark.parametrize("name", sorted(set(REPORTS) - {"html"}))
def test_a_report_is_the_same_at_every_call(
    name: str, results: Results, written: dict[str, list[Path]], tmp_path: Path
) -> None:
    for old, new in zip(written[name], REPORTS[name].write(results, tmp_path), strict=True):
        assert old.read_bytes() == new.read_bytes()


def test_no_report_says_nan(written: dict[str, list[Path]]) -> None:
    for path in (path for paths in written.values() for path in paths if path.suffix != ".png"):
        assert not re.search(r"\b(nan|NaN|inf|None|Infinity)\b", SCRIPT.sub("", path.read_text()))


@pytest.mark.parametrize("points", [(), POINTS[:1]], ids=["no workload", "no implementation"])
def test_a_run_without_records_can_be_reported(points: tuple[journals.Workload, ...], tmp_path: Path) -> None:
    empty = journals.write(tmp_path / "run", points, (), is_finished=False)
    for report in REPORTS.values():
        report.write(empty, tmp_path)
    assert "did not finish" in (tmp_path / "summary.md").read_text()
    assert "did not finish" in (tmp_path / "report.html").read_text()


def test_a_run_in_which_nothing_is_ok_can_be_reported(tmp_path: Path) -> None:
    points = journals.workloads(mask=("causal",), scope=("module",), seq_len=(128,))
    failed = journals.write(tmp_path / "run", points, ("module_list",))
    for report in REPORTS.values():
        report.write(failed, tmp_path)
    assert not (tmp_path / "picture.png").exists()  # nothing to draw
    assert "module_list: WRONG at T=128: " in (tmp_path / "summary.md").read_text()


class TestMarkdown:
    def test_every_row_has_every_cell_and_none_is_blank(self, results: Results, markdown: str) -> None:
        lines = [line for line in markdown.splitlines() if line.startswith("|")]
        assert len(lines) > len(results.records) / 2
        for line in lines:
            texts = re.split(r"(?<!\\)\|", line)[1:-1]
            assert all(text.strip() for text in texts)

    def test_it_has_200_lines_at_most_and_says_what_it_leaves_out(self, tmp_path: Path) -> None:
        many = journals.workloads(mask=("none", "causal"), num_heads=(1, 2, 4, 8, 16), seq_len=(64, 128, 256))
        text = summary.markdown(journals.write(tmp_path, many, num_epochs=1))
        assert text.count("\n") <= 200
        (number,) = re.findall(r"^(\d+) more groups of shapes are in report.html", text, re.MULTILINE)
        assert int(number) + text.count("\n### ") == 10

    def test_text_from_outside_has_no_effect(self, markdown: str) -> None:
        assert "<script" not in markdown
        assert "<b>" not in markdown
        assert not re.search(r"(?<!\\)\[b", markdown)
        assert "\x1b" not in markdown
        assert escaped("a|b `c` *d* [e](f) <g> \\") == "a\\|b \\`c\\` \\*d\\* \\[e\\](f) &lt;g&gt; \\\\"

    def test_findings_are_listed_once_for_all_lengths(self, markdown: str) -> None:
        assert "- module_list: WRONG at T=128, 2048: " in markdown
        assert (
            "naive_loop" not in markdown.split("## Findings", maxsplit=1)[1].split("## Cells", maxsplit=1)[0]
        )  # predicted: not a finding


class TestCsv:
    def test_it_reads_back_with_every_cell(self, results: Results, written: dict[str, list[Path]]) -> None:
        read = pd.read_csv(written["csv"][0])
        assert len(read) == len(results.records)
        assert read.loc[read["status"] != "ok", "latency_s"].isna().all()

    def test_no_text_is_a_formula(self, written: dict[str, list[Path]]) -> None:
        with written["csv"][0].open(newline="") as file:
            texts = [field for line in csv.reader(file) for field in line]
        assert all(texts)  # none is blank
        starts = [text for text in texts if text.startswith(("=", "+", "-", "@", "\t", "\r"))]
        assert starts == []
        assert "'=cmd|" in "".join(texts)
        for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r\n=1", "  =1"):
            assert guarded(text).startswith("'")


class TestPytestBenchmark:
    def test_statistics_by_value(self, results: Results) -> None:
        first = pytest_benchmark.document(results)["benchmarks"][0]
        data = first["stats"]["data"]
        assert first["stats"]["rounds"] == len(data) == 64
        assert first["stats"]["min"] == min(data) <= first["stats"]["q1"] <= first["stats"]["median"]
        assert first["stats"]["ops"] == pytest.approx(1 / (math.fsum(data) / len(data)))
        assert first["params"]["seq_len"] == 128
        assert "node" not in pytest_benchmark.document(results)["machine_info"]  # no name of a host


class TestPage:
    def test_nothing_is_loaded(self, page: str, whole: str) -> None:
        tags, loads = set(re.findall(r"<(\w+)", page)), LOADS.findall(page)
        assert {"script", "link", "iframe", "object"}.isdisjoint(tags)
        scripts = SCRIPT.findall(whole)
        assert [each.partition(">")[0] for each in scripts] == [
            '<script type="application/json" id="data"',
            *["<script"] * 2,
        ]
        assert "default-src 'none'" in page
        assert all(load.startswith("#") for load in loads)
        assert not re.search(r"@import|url\((?!#)|javascript:|\son\w+=", page)
        links = set(re.findall(r"https?://[^\s\"'<>)]+", page)) - {"http://c.example"}  # text of a name, not a link
        assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}

    def test_time_against_length_is_its_one_picture(self, page: str, tmp_path: Path) -> None:
        assert "<img " not in page  # two lengths
        many = journals.workloads(mask=("none", "causal"), seq_len=(64, 128, 256, 512, 1024))
        text = SCRIPT.sub("", summary.html_page(journals.write(tmp_path, many)))
        (loaded,) = LOADS.findall(text)
        assert loaded.startswith("data:image/png;base64,")
        assert '<img alt="Time per call against length' in text

    def test_options_and_names_are_broken_only_where_they_may_be(
        self, results: Results, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def troubles(_: Results) -> list[str]:
            return ["Give --budget 40, or <b>fewer</b> shapes."]

        monkeypatch.setattr(summary, "troubles", troubles)
        text = summary.html_page(results)
        assert 'Give <span class="whole">--budget</span> 40, or &lt;b&gt;fewer&lt;/b&gt; shapes.' in text
        assert '<th scope="col">sdpa_<wbr>flash</th>' in text
        assert "FLOP/s: useful FLOPs" in text

    def test_the_answer_is_a_table_with_a_row_for_each_shape(self, results: Results, page: str) -> None:
        (table,) = re.findall(r'<table class="cards">.*?</table>', page, re.DOTALL)
        assert table.count('<th scope="row">') == len(POINTS)
        headings = re.findall(r'data-heading="([^"]+)"', table.partition("</tr>")[2].partition("</tr>")[0])
        assert list(map(html.unescape, headings)) == list(answers.table(answers.shapes(results))[0])[1:]
        assert page.index('class="cards"') < page.index('id="explore-title"')

    def test_no_cell_is_blank_and_text_from_outside_is_text(
        self, results: Results, whole: str, explored: dict[str, Any]
    ) -> None:
        texts = [text for row in explored["rows"] for text in row["text"]]
        assert len(texts) == len(results.records) * (1 + len(cells.columns(results)))
        assert all(text.strip() for text in texts)
        assert sanitize_line(journals.EVIL) in texts
        assert sanitize_line(journals.REASON) in texts
        assert whole.count("<script>alert") == 0  # as in one of the names

    def test_each_column_has_a_key_to_sort_by_and_each_axis_its_values(self, explored: dict[str, Any]) -> None:
        assert all(len(row["keys"]) == len(row["text"]) == len(explored["columns"]) for row in explored["rows"])
        places = {column["heading"]: place for place, column in enumerate(explored["columns"])}
        assert any(isinstance(row["keys"][places["verdict"]], float) for row in explored["rows"])
        assert set(explored["axes"]) == {"seq_len", "kv_len", "mask", "scope"}
        assert {row["implementation"] for row in explored["rows"]} == set(explored["colours"])
        times = [(row["time_low"], row["keys"][places["time per call"]], row["time_high"]) for row in explored["rows"]]
        assert sum(low is not None for low, _, _ in times) > 10
        assert all(low < time < high for low, time, high in times if low is not None)


def test_the_page_has_the_notices_of_the_library_in_it(whole: str) -> None:
    assert vega.NOTICES.read_text(encoding="utf-8") in whole
    assert "THIRD_PARTY_NOTICES" in SCRIPT.sub("", whole)


@pytest.mark.long
def test_the_library_of_the_page_is_the_one_of_its_package() -> None:
    assert explorer.LIBRARY.read_text(encoding="utf-8") == vega.bundle(), "run: python -m tools.vega"
