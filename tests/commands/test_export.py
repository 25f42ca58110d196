"""What other tools get of a run: each format is what its tool reads."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench import cli
from tests import journals

POINTS = journals.workloads(scope=("attention",), mask=("none", "causal"), seq_len=(128, 2048))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for seed, name in enumerate(("one", "other")):
        journals.write(tmp_path / "results" / "runs" / name, POINTS, seed=seed)
    return tmp_path / "results"


def exported(results: Path, monkeypatch, capsys, *options: str) -> str:
    monkeypatch.setattr("sys.argv", ["attnbench", "export", *options, "--results", str(results)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert left.value.code == 0, said.err
    return said.out


def test_a_table_has_the_cells_of_all_runs(results, monkeypatch, capsys):
    one = list(csv.DictReader(io.StringIO(exported(results, monkeypatch, capsys, "one"))))
    both = list(csv.DictReader(io.StringIO(exported(results, monkeypatch, capsys, "one", "other"))))
    assert len(both) == 2 * len(one)
    assert {row["run"] for row in both} == {"one", "other"}


def test_the_benchmark_database_gets_a_record_for_each_metric_with_all_samples(results, monkeypatch, capsys):
    found = json.loads(exported(results, monkeypatch, capsys, "one", "--format", "oss-ci-v3"))
    rows = list(csv.DictReader(io.StringIO(exported(results, monkeypatch, capsys, "one"))))
    times = [each for each in found if each["metric"]["name"] == "latency"]
    assert len(times) == sum(row["latency_s"] not in {"", "NA"} for row in rows)
    num_samples = sum(int(row["num_samples"]) for row in rows)
    assert sum(len(each["metric"]["benchmark_values"]) for each in times) == num_samples
    assert {each["benchmark"]["mode"] for each in found} == {"inference"}
    assert {each["benchmark"]["dtype"] for each in found} == {"float32"}
    assert {each["inputs"]["seq_len"]["extra_info"]["value"] for each in found} == {128, 2048}
    assert all(each["dependencies"]["torch"]["version"] for each in found)
    assert {"latency", "peak_memory"} <= {each["metric"]["name"] for each in found}


def test_series_for_the_action_have_names_values_and_units(results, monkeypatch, capsys):
    found = json.loads(exported(results, monkeypatch, capsys, "one", "--format", "customSmallerIsBetter"))
    assert found
    assert all({"name", "value", "unit"} <= set(each) for each in found)


def test_pytest_benchmark_compares_two_exports(results, monkeypatch, capsys, tmp_path):
    for name in ("one", "other"):
        to = str(tmp_path / f"{name}.json")
        exported(results, monkeypatch, capsys, name, "--format", "pytest-benchmark", "--to", to)
    compare = [sys.executable, "-m", "pytest_benchmark", "compare", "one.json", "other.json"]
    done = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fused[" in done.stdout


def test_one_run_at_a_time_for_a_format_that_holds_one(results, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["attnbench", "export", "one", "other", "--format", "pytest-benchmark", "--results", str(results)]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "name a single RUN" in capsys.readouterr().err
