"""The shared table: every record has a row, every row every cell, groups have titles, warnings are shown."""

import dataclasses
import math
from pathlib import Path

import pytest

from attnbench.analysis.results import Results
from attnbench.analysis.sanity import SystemLoad
from attnbench.reports import cells, plotted_metrics, summary, titles
from attnbench.units import escaped, percent, sanitize_line
from tests import journals, tables

SPEEDS = ("time per call", "FLOP/s", "peak memory")
POINTS = journals.workloads(scope=("attention", "module"), mask=("none", "causal"), seq_len=(128, 2048))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return journals.write(tmp_path_factory.mktemp("run"), POINTS)


def test_no_cell_is_blank_and_every_column_is_there(results: Results) -> None:
    assert len(tables.every(results)) == len(results.records)
    for row in tables.every(results):
        assert list(row.texts) == [column.heading for column in cells.columns(results)]
        assert all(text.strip() for text in row.texts.values())


def test_rows_go_by_length_and_then_fastest_first(results: Results) -> None:
    for members in cells.groups(results).values():
        keys = [(cell.workload.seq_len, cell.workload.kv_len, cell.seconds or math.inf) for cell in members]
        assert keys == sorted(keys)


def test_what_is_not_ok_shows_no_speed_and_gives_its_reason(results: Results) -> None:
    failed = [row for row in tables.every(results) if row["status"] != "ok"]
    assert failed
    for row in failed:
        assert [row.texts[column] for column in SPEEDS] == ["-"] * len(SPEEDS)
        assert row.texts["notes"] == sanitize_line(row["message"])
    assert {row.texts["verdict"] for row in failed} >= {"timeout (predicted)", "unsupported", "crashed", "WRONG"}


def test_groups_are_titled_in_words(results: Results) -> None:
    found = list(cells.groups(results))
    assert found[0] == "attention only, forward, float32, no mask, B=1 H=8 K=64"
    assert found[3] == "whole module, forward, float32, causal, B=1 H=8 K=64"


def test_unusual_axes_are_reported() -> None:
    axes = {"num_kv_heads": 2, "dropout": 0.1, "device": "cuda:1", "num_threads": 1, "seed": 3, "value_dim": 32}
    axes |= {"layout": "transposed", "float32_matmul_precision": "high"}
    reported = titles.title(journals.Workload(direction="inference", mask="sliding_window(8)", **axes).axes())
    head = "attention only, inference, float32, sliding window(8), B=1 H=8 G=2 K=64 V=32, on cuda:1"
    assert reported.startswith(f"{head}, ")
    others = {"dropout=0.1", "num_threads=1", "seed=3", "layout=transposed", "float32_matmul_precision=high"}
    assert set(reported.removeprefix(f"{head}, ").split(", ")) == others  # as --set takes them


def test_doubts_stand_beside_the_numbers(tmp_path: Path) -> None:
    points = journals.workloads(dtype=("float32", "bfloat16"), seq_len=(2048,))
    short = journals.write(tmp_path, points, ("sdpa", "fused"), num_epochs=1, num_visits=2)
    notes = {(row["dtype"], row["implementation"]): row.texts["notes"] for row in tables.every(short)}
    assert notes["float32", "sdpa"] == "-"
    assert notes["float32", "fused"] == "65,536 page faults a call (about 53 % of the time): try --conditions retain"
    assert notes["bfloat16", "sdpa"] == "this processor has no bfloat16 arithmetic and may run slow fallback code"


@pytest.mark.parametrize(("others", "stolen"), [(0.04, 0.05), (0.0, 0.2)])
def test_what_others_and_the_host_took_is_among_the_facts(results: Results, others: float, stolen: float) -> None:
    load = SystemLoad(others=others, stolen=stolen, free_bytes=2**30)
    loaded = dataclasses.replace(results, system_load=load)
    facts = summary.facts(loaded)
    shares = percent(others), percent(stolen)
    assert "used {} of the processors' time, and the hypervisor {}".format(*shares) in facts["interference"]


def test_an_error_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    lied = journals.write(tmp_path, POINTS[:1], ("sdpa", "liar"))
    assert [row.texts["error"] for row in tables.every(lied) if row["implementation"] == "liar"] == ["not finite"]


def test_what_this_run_could_not_have_is_reported_once_and_takes_no_row(tmp_path: Path) -> None:
    found = journals.write(tmp_path / "one", POINTS[:4], ("sdpa", "fused", "torch_mha"))
    assert "torch_mha" in {row["implementation"] for row in tables.every(found)}  # for programs
    assert "torch_mha" not in {cell.name for members in cells.groups(found).values() for cell in members}
    reported = f"torch_mha ({sanitize_line(journals.REASON)})"
    assert summary.facts(found)["not available here"] == reported
    assert f"- **not available here**: {escaped(reported)}\n" in summary.markdown(found)
    picture = plotted_metrics.draw(found, plotted_metrics.TIME)
    assert picture is not None
    assert "torch_mha" not in picture.caption


def test_a_run_of_nothing_but_the_unsupported_shows_why(tmp_path: Path) -> None:
    found = journals.write(tmp_path, POINTS[:2], ("torch_mha",))
    assert {row.texts["notes"] for row in tables.every(found)} == {sanitize_line(journals.REASON)}
