"""Runs as tables: one row for each cell, missing values missing, independent of the path."""

import dataclasses
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from attnbench.analysis.table import CELL_COLUMNS, SAMPLE_COLUMNS, load, metric_columns, samples
from attnbench.analysis.table import table as of_run
from attnbench.reports.cells import all_cells
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import Measurement, Sample
from attnbench.workloads.workload import Workload
from tests import journals

POINTS = journals.workloads(mask=("none", "causal"), seq_len=(128, 2048))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    journals.write(results / "runs" / "2025-11-02-first", POINTS)
    journals.write(results / "runs" / "2025-11-03-second", POINTS, ("sdpa", "fused"))
    return results


@pytest.fixture(scope="module")
def table(folder: Path) -> pd.DataFrame:
    return load(folder / "runs" / "2025-11-02-first")


def test_one_row_for_each_cell(table: pd.DataFrame) -> None:
    assert len(table) == len(POINTS) * len(journals.SPEEDS)
    assert not table.duplicated(["workload", "implementation"]).any()


def test_every_axis_and_every_promised_column_is_there(table: pd.DataFrame) -> None:
    promised = {"latency_s", "latency_low_s", "latency_high_s", "ratio", "ratio_low", "ratio_high", "verdict"}
    promised |= {"peak_memory_bytes", "score_matrix_bytes", "error_ratio", "num_samples", "fingerprint"}
    assert promised | set(Workload.__struct_fields__) | set(CELL_COLUMNS) <= set(table.columns)


def test_a_folder_its_journal_and_the_results_folder_give_the_same_rows(folder: Path, table: pd.DataFrame) -> None:
    run = folder / "runs" / "2025-11-02-first"
    pd.testing.assert_frame_equal(load(run / JOURNAL), table)
    both = load(folder)
    assert set(both["run"]) == {"2025-11-02-first", "2025-11-03-second"}
    pd.testing.assert_frame_equal(both[both["run"] == "2025-11-02-first"].reset_index(drop=True), table)
    assert len(load(folder, run)) == len(both) + len(table)


def test_what_has_no_time_is_missing_and_never_zero(table: pd.DataFrame) -> None:
    failed = table[table["status"] != "ok"]
    assert len(failed) > 0
    numbers = ["latency_s", "latency_low_s", "latency_high_s", "ratio", "ratio_low", "ratio_high", "peak_memory_bytes"]
    assert failed[numbers].isna().all(axis=None)
    assert failed["verdict"].isna().all()
    assert failed["message"].notna().all()
    assert (failed["num_samples"] == 0).all()


def test_raw_samples_keep_their_place_and_say_their_metric(folder: Path, table: pd.DataFrame) -> None:
    raw = samples(folder / "runs" / "2025-11-02-first")
    assert list(raw.columns) == list(SAMPLE_COLUMNS)
    assert set(raw["metric"]) == {"latency", "peak_memory"}
    latency = raw[raw["metric"] == "latency"]
    assert len(latency) == table["num_samples"].sum()
    cell = latency[(latency["implementation"] == "sdpa") & (latency["workload"] == POINTS[0].id)]
    assert cell["value"].median() == pytest.approx(table.loc[table["implementation"] == "sdpa", "latency_s"].iloc[0])


def test_a_path_without_a_run_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run: give a run's folder, its journal"):
        load(tmp_path)


def test_two_rows_of_one_cell_are_refused(tmp_path: Path) -> None:
    results = journals.write(tmp_path, POINTS[:2], ("sdpa", "fused"))
    assert len(of_run(results)) == 4
    twice = dataclasses.replace(results, records=(*results.records, results.records[1]))
    with pytest.raises(AssertionError, match=r"two rows of one cell: .*'implementation': 'fused'"):
        of_run(twice)
    sided = msgspec.structs.replace(results.records[1], side="base")
    assert len(of_run(dataclasses.replace(results, records=(*results.records, sided)))) == 5


def test_any_metric_has_a_column_with_its_unit(tmp_path: Path) -> None:
    results = journals.write(tmp_path, POINTS[:1], ("sdpa",))
    found = Measurement(metric="wait", unit="J/s", samples=(Sample(2.5), Sample(1.5), Sample(9.0)))
    (record,) = results.records
    reported = dataclasses.replace(results, records=(msgspec.structs.replace(record, measurements=(found,)),))
    assert of_run(reported)["wait_j_per_s"].tolist() == [2.5]
    assert [(each.name, each.unit, each.heading) for each in metric_columns(reported)] == [
        ("wait_j_per_s", "J/s", "wait")
    ]


def test_rates_of_a_paged_batch_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    """A token has keys and values of 2 heads and 8 + 8 numbers: 128 bytes in float32, and 32 in 8 bits.

    Copies reach 80 GB/s, but a third of it beyond 2**19 bytes.
    """
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 16}
    mixed, many = Workload(batch="4q1kv64_q3kv16", **sizes), Workload(batch="128q1kv64", **sizes)
    rates = {  # bytes of the cache, new tokens, bytes/s of a copy
        mixed: ((4 * 64 + 16) * 128, 7, 80e9),
        mixed.with_axes({"cache_dtype": "float8_e4m3fn"}): ((4 * 64 + 16) * 32, 7, 80e9),
        many: (128 * 64 * 128, 128, 80e9 / 3),
        many.with_axes({"shared_prefix": 32}): ((32 + 128 * 32) * 128, 128, 80e9 / 3),
    }
    results = journals.write(tmp_path, (*rates, Workload()), ("sdpa", "paged_gather"))
    rows = of_run(results).set_index("workload")
    for point, (num_bytes, num_tokens, copy) in rates.items():
        found = rows.loc[point.id]
        assert list(found["cache_bytes_per_s"] * found["latency_s"]) == pytest.approx([num_bytes] * 2)
        assert list(found["tokens_per_s"] * found["latency_s"]) == pytest.approx([num_tokens] * 2)
        assert list(found["copy_share"] * copy) == pytest.approx(list(found["cache_bytes_per_s"]))
    assert rows.loc[Workload().id, ["cache_bytes_per_s", "copy_share", "tokens_per_s"]].isna().all(axis=None)
    for cell in all_cells(results).values():
        known = rates.get(cell.workload)
        assert cell.is_gathered is (cell.name == "sdpa" and known is not None)
        shown = (cell.cache_rate, cell.token_rate, cell.copy_rate)
        if known is None:
            assert shown == (None, None, None)
        else:
            time_s = cell.estimate.point
            assert shown == pytest.approx((known[0] / time_s, known[1] / time_s, known[2]))
