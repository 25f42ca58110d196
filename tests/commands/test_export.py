"""`attnbench report --format`: each format is readable by its tool."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench import cli
from attnbench.analysis.comparisons import comparisons
from tests import journals

POINTS = journals.workloads(scope=("attention",), mask=("none", "causal"), seq_len=(128, 2048))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for seed, name in enumerate(("one", "other")):
        journals.write(tmp_path / "results" / "runs" / name, POINTS, seed=seed)
    return tmp_path / "results"


def exported(results: Path, monkeypatch, capsys, *options: str) -> str:
    kind = () if "--format" in options else ("--format", "csv")
    monkeypatch.setattr("sys.argv", ["attnbench", "report", *kind, *options, "--results", str(results)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert left.value.code in {0, 3}, said.err  # on a busy machine it gives no verdict
    return said.out


def test_a_table_has_the_cells_of_all_runs(results, monkeypatch, capsys):
    one = list(csv.DictReader(io.StringIO(exported(results, monkeypatch, capsys, "one"))))
    both = list(csv.DictReader(io.StringIO(exported(results, monkeypatch, capsys, "one", "other"))))
    assert len(both) == 2 * len(one)
    assert {row["run"] for row in both} == {"one", "other"}


def test_series_for_the_action_have_names_values_and_units(results, monkeypatch, capsys):
    found = json.loads(exported(results, monkeypatch, capsys, "one", "--format", "customSmallerIsBetter"))
    assert found
    assert all(list(each) == ["name", "unit", "value", "range", "extra"] for each in found)
    assert len({each["name"] for each in found}) == len(found)
    (time, *_) = (each for each in found if each["name"].startswith("sdpa on ") and each["name"].endswith(": latency"))
    assert time["unit"] == "us"
    assert re.fullmatch(r"± [\d.]+", time["range"])
    assert {(each["unit"], each["range"]) for each in found if each["name"].endswith("peak_memory")} == {
        ("bytes", "exact")
    }


def test_pytest_benchmark_compares_two_exports(results, monkeypatch, capsys, tmp_path):
    for name in ("one", "other"):
        to = str(tmp_path / f"{name}.json")
        exported(results, monkeypatch, capsys, name, "--format", "pytest-benchmark", "--to", to)
    compare = [sys.executable, "-m", "pytest_benchmark", "compare", "one.json", "other.json"]
    done = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fused[" in done.stdout
    assert "Failed" not in done.stdout + done.stderr


def test_one_run_at_a_time_for_a_format_that_holds_one(results, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["attnbench", "report", "one", "other", "--format", "pytest-benchmark", "--results", str(results)]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "name a single RUN" in capsys.readouterr().err


def test_traces_are_written_of_what_has_a_definition_and_was_tried(tmp_path, monkeypatch, capsys):
    points = journals.workloads(
        scope=("attention",),
        mask=("causal", "none"),
        seq_len=(128, 2048),
        dtype=("bfloat16",),
        direction=("inference",),
    )
    names = ("sdpa", "fused", "liar", "naive_loop", "torch_mha", "sdpa_math")
    stored = journals.write(tmp_path / "results" / "runs" / "traced", points, names)
    text = exported(tmp_path / "results", monkeypatch, capsys, "--format", "flashinfer-trace")
    found = {
        (each["solution"], each["workload"]["axes"]["total_q"]): each for each in map(json.loads, text.splitlines())
    }
    tried = {"sdpa", "fused", "liar", "sdpa_math"}  # torch_mha has no parts, naive_loop is too slow at 2048
    assert set(found) == {(name, length) for name in tried for length in (128, 2048)} | {("naive_loop", 128)}
    assert {each["definition"] for each in found.values()} == {"gqa_ragged_prefill_causal_h8_kv8_d64"}
    assert found["sdpa", 128]["evaluation"]["performance"]["speedup_factor"] == 1.0
    fused = found["fused", 128]["evaluation"]
    assert fused["status"] == "PASSED"
    times = fused["performance"]
    assert times["speedup_factor"] == pytest.approx(times["reference_latency_ms"] / times["latency_ms"])
    (ratio,) = (
        each.ratio
        for each in comparisons(stored)
        if each.implementation == "fused" and each.workload.seq_len == 128 and each.workload.mask == "causal"
    )
    assert 1 / times["speedup_factor"] == pytest.approx(ratio)
    assert fused["correctness"]["max_absolute_error"] > 0
    assert fused["environment"]["libs"]["torch"]
    wrong = found["liar", 128]["evaluation"]
    assert (wrong["status"], wrong["performance"]) == ("INCORRECT_NUMERICAL", None)
    assert wrong["correctness"]["max_absolute_error"] == "NaN"
    failed = found["sdpa_math", 2048]["evaluation"]
    assert (failed["status"], failed["correctness"], failed["performance"]) == ("RUNTIME_ERROR", None, None)
    assert "signal 9" in failed["log"]


def test_without_a_definition_there_is_nothing_to_write(results, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["attnbench", "report", "one", "--format", "flashinfer-trace", "--results", str(results)]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "no cell that was tried has a definition" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_workers")
def test_the_calls_of_a_service_are_replayed_and_their_lines_come_back(tmp_path, monkeypatch, capsys):
    lines = [
        {"uuid": name, "axes": {"batch_size": 1, "num_kv_indices": 2, "len_indptr": 2}, "inputs": {}} for name in "ab"
    ]
    (tmp_path / "gqa_paged_decode_h4_kv2_d8_ps16.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.chdir(tmp_path)
    options = ["--set", "dtype=float32", "--budget", "0", "--conditions", "shared"]
    sweep = ["--sweep", "gqa_paged_decode_h4_kv2_d8_ps16.jsonl", "-i", "fused"]
    monkeypatch.setattr("sys.argv", ["attnbench", "run", *sweep, *options])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert left.value.code in {0, 3}, said.err  # on a busy machine it gives no verdict
    if not left.value.code:
        assert "2 calls of attention: " in " ".join(said.out.split())
    back = [
        json.loads(each)
        for each in exported(Path("results"), monkeypatch, capsys, "--format", "flashinfer-trace").splitlines()
    ]
    assert [(each["solution"], each["workload"]) for each in back] == [
        (name, line) for name in ("fused", "sdpa") for line in lines
    ]


def test_a_plot_is_written_by_its_name(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["attnbench", "report", str(results / "runs" / "one"), "--format", "ratio_plot", "--to", str(tmp_path / "out")],
    )
    with pytest.raises(SystemExit) as ends:
        cli.main()
    assert ends.value.code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"ratio_plot.svg", "ratio_plot.png"}
    assert "ratio_plot.svg" in capsys.readouterr().out


def test_a_format_that_does_not_exist_is_named_with_all_that_do(results, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attnbench", "report", str(results / "runs" / "one"), "--format", "ratio_plots"])
    with pytest.raises(SystemExit) as ends:
        cli.main()
    assert ends.value.code == 2
    assert "did you mean ratio_plot?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["--format", "csv", "--open"], ["--format", "csv", "--salvage"], ["--salvage"], ["--salvage", "--open"]],
)
def test_what_writes_no_reports_excludes_their_options(results, monkeypatch, capsys, options):
    monkeypatch.setattr("sys.argv", ["attnbench", "report", *options, "--results", str(results)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "--salvage" in capsys.readouterr().err
