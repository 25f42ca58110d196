"""`attnbench report`: one report by its name, readable by its tool, and several runs joined into one."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import read
from attnbench.commands.run import shard
from tests import journals

POINTS = journals.workloads(scope=("attention",), mask=("none", "causal"), seq_len=(128, 2048))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    journals.write(tmp_path / "results" / "runs" / "one", POINTS)
    return tmp_path / "results"


@pytest.fixture
def called(called, results):
    def call(*arguments: str, code: int = 0) -> str:
        ended = called("report", *arguments, "--results", results)
        assert ended.returncode == code, ended.stderr
        return ended.stderr if code else ended.stdout

    return call


def test_a_text_is_printed_or_put_into_a_file(results, called, tmp_path):
    printed = called("one", "--format", "csv")
    assert {row["run"] for row in csv.DictReader(io.StringIO(printed))} == {"one"}
    called("one", "--format", "csv", "--to", str(tmp_path / "deep" / "cells.csv"))
    assert (tmp_path / "deep" / "cells.csv").read_text() == printed
    assert json.loads(called("one", "--format", "csv", "--json"))["text"] == printed
    assert {path.name for path in (results / "runs" / "one").iterdir()} == {"journal.jsonl"}


def test_pytest_benchmark_compares_two_runs(results, called, tmp_path):
    journals.write(results / "runs" / "other", POINTS, seed=1)
    for name in ("one", "other"):
        called(name, "--format", "pytest-benchmark", "--to", str(tmp_path / f"{name}.json"))
    compare = [sys.executable, "-m", "pytest_benchmark", "compare", "one.json", "other.json"]
    done = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fused[" in done.stdout


def test_a_picture_is_put_into_the_run_or_into_a_file(results, called, tmp_path):
    assert "ratio_plot.png" in called("one", "--format", "ratio_plot")
    assert {path.name for path in (results / "runs" / "one").glob("*_plot*")} == {"ratio_plot.png"}
    called("one", "--format", "latency_plot", "--to", str(tmp_path / "time.png"))
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")
    assert "end its name with .png, .svg or .pdf" in called(
        "one", "--format", "latency_plot", "--to", str(tmp_path / "time.gif"), code=2
    )


def test_a_format_that_does_not_exist_is_named_with_all_that_do(called):
    assert "did you mean ratio_plot?" in called("one", "--format", "ratio_plots", code=2)


@pytest.mark.parametrize(
    "options", [["--format", "csv", "--open"], ["--format", "csv", "--salvage"], ["--salvage"], ["--salvage", "--open"]]
)
def test_what_writes_no_reports_excludes_their_options(called, options):
    assert "--salvage" in called(*options, code=2)


def test_the_parts_of_a_run_have_every_shape_once_and_their_share_of_false_verdicts(tmp_path):
    plan = journals.write(tmp_path / "whole", POINTS).plan
    plan = msgspec.structs.replace(plan, left_out={"fused": (POINTS[0].id, POINTS[1].id)})
    parts = [shard(plan, f"{place}/3") for place in (1, 2, 3)]
    assert [len(part.workloads) for part in parts] == [2, 1, 1]
    assert {each.id for part in parts for each in part.workloads} == {each.id for each in POINTS}
    assert sum(part.false_share for part in parts) == pytest.approx(plan.false_share)
    assert sum(part.num_cells for part in parts) == plan.num_cells
    for text in ("0/3", "4/3", "1/5", "1/", "a/b", "/"):
        with pytest.raises(ValueError, match=f"--shard {text} is not allowed: give K/N with 1 <= K <= N <= 4"):
            shard(plan, text)


def test_parts_become_one_run_with_the_same_verdicts(results, called):
    names = [f"part_{place}" for place in (1, 2, 3)]
    parts = [journals.write(results / "runs" / name, POINTS[place::3]) for place, name in enumerate(names)]
    page = Path(called(*names).split(": ")[1].strip())
    joined = read(page.parent)
    assert joined.run == "part_1-joined"
    files = {"report.html", "records.csv", "summary.md", "journal.jsonl"}
    assert {path.name for path in page.parent.iterdir()} >= files
    assert {record.key for record in joined.records} == {record.key for part in parts for record in part.records}
    assert joined.elapsed_s == max(part.elapsed_s for part in parts)
    before = {each.key: each.ratio for part in parts for each in comparisons(part)}
    assert {each.key: each.ratio for each in comparisons(joined)} == pytest.approx(before)
    assert sum(1 for record in joined.records for _ in record.samples("latency")) == sum(
        1 for part in parts for record in part.records for _ in record.samples("latency")
    )
    assert "part_2 (" in (page.parent / "summary.md").read_text()  # which run measured which shape
    again = called(*names, "--format", "csv")
    assert len(list(csv.DictReader(io.StringIO(again)))) == len(joined.records)


def test_runs_that_are_no_parts_of_one_are_refused_with_the_reason(results, called):
    journals.write(results / "runs" / "same", POINTS[:1])
    assert "attnbench gate compares two runs of the same shapes" in called("one", "same", code=2)
    others = journals.workloads(scope=("module",))
    journals.write(results / "runs" / "killed", others, is_finished=False)
    assert "killed has not finished" in called("one", "killed", code=2)
    journals.write(results / "runs" / "fewer", others, ("sdpa", "fused"))
    assert "are not parts of one run" in called("one", "fewer", code=2)
