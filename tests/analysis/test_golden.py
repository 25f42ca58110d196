"""Journals of an earlier version load with that version's times, and nearly its ratios.

Verdicts follow today's rules: those journals have few processes, so that most comparisons are undecided now.

tests/data/golden holds the output of commit 3a4cd98 for them, in full precision: the gallery's runs of that time,
comparisons of two sides in one process and in two (simulated, `x` 8 % slower), and two runs, one the baseline of the
other (`y` 8 % slower). All are of schema 3, with arms as names. Never regenerate them with later code.
"""

import gzip
import json
import math
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import attnbench
from attnbench.analysis.gate.rulings import ENDINGS, Kind
from attnbench.cli import app
from attnbench.statistics.verdict import Reason
from attnbench.storage import older

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MERGED = {"reference": "same"}  # a ruling that is no longer of a kind of its own
CELL = ("workload", "implementation", "side")
KEPT = (*CELL, "status", "latency_s", "error_ratio", "peak_memory_bytes")
NOT_COMPARED = {"latency", "error_ratio"}  # errors on other inputs are no longer compared
OLD = {"finding": "fail", "improvement": "pass", "pass": "pass", "inconclusive": "inconclusive"}
"""The endings of the outcomes in the stored decisions."""
EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3, "invalid session": 4}


def golden(name: str) -> dict:
    return json.loads(gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes()))


def unpacked(name: str, folder: Path) -> Path:
    (folder / name).mkdir()
    (folder / name / "journal.jsonl").write_bytes(gzip.decompress((GOLDEN / f"{name}.jsonl.gz").read_bytes()))
    assert older.convert(folder / name / "journal.jsonl")
    return folder / name


def cells(run: Path) -> list[dict]:
    frame = attnbench.table(run).fillna({"side": ""}).reindex(columns=[*KEPT, "verdict", "ratio", "reason"])
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def assert_same(found: list[dict], expected: list[dict], keys: tuple[str, ...]) -> None:
    """Compare rows in any order: texts equal, numbers within 1e-9."""
    ours, theirs = (pd.DataFrame(rows).set_index(list(keys)).sort_index() for rows in (found, expected))
    assert ours.index.is_unique
    assert ours.index.equals(theirs.index)
    for name in theirs.columns:
        numbers = pd.api.types.is_numeric_dtype(theirs[name]) or theirs[name].isna().all()
        if numbers:
            pd.testing.assert_series_equal(
                ours[name].astype(float), theirs[name].astype(float), rtol=1e-9, atol=0.0, check_index_type=False
            )
        else:
            assert ours[name].fillna("").tolist() == theirs[name].fillna("").tolist(), name


FULL = pytest.param("full", marks=pytest.mark.long)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["quick", FULL, "compiled", "one_process", "two_processes", "stored_base", "stored_candidate"]
)
def test_cells_have_the_times_that_they_had(name, tmp_path):
    expected, found = golden(name)["cells"], cells(unpacked(name, tmp_path))
    compared = [row for row in found if row["verdict"] is not None]
    assert len(compared) == sum(row["verdict"] is not None for row in expected) >= 4
    then = {tuple(row[key] for key in CELL): row for row in expected}
    for row in compared:
        before = then[tuple(row[key] for key in CELL)]
        assert abs(math.log(row["ratio"] / before["ratio"])) < 0.3  # of three processes; it was a winsorized mean
        assert row["verdict"] in {before["verdict"], "undecided"}
        assert (row["reason"] in set(Reason)) is (row["verdict"] == "undecided")
    ours, theirs = ([{key: row[key] for key in KEPT} for row in rows] for rows in (found, expected))
    assert_same(ours, theirs, CELL)


@pytest.mark.parametrize(
    "names", [("one_process",), ("two_processes",), ("stored_base", "stored_candidate")], ids=lambda names: names[-1]
)
def test_the_gate_says_what_it_said_of_all_but_times(names, tmp_path):
    expected = golden(names[-1])["gate"]
    paths = [str(unpacked(name, tmp_path)) for name in names]
    done = CliRunner().invoke(app, ["gate", *paths, "--json"])
    decision = json.loads(done.stdout)
    assert decision["ending"] in {OLD[expected["outcome"]], "inconclusive"}
    assert done.exit_code == EXIT_CODES[decision["ending"]]
    fields = [name for name in expected["rulings"][0] if name not in {"outcome", "effect", "low", "high", "smallest"}]
    for ruling in expected["rulings"]:
        ruling["kind"] = MERGED.get(ruling["kind"], ruling["kind"])
        if ruling["metric"] not in NOT_COMPARED:
            assert ENDINGS[Kind(ruling["kind"])] == OLD[ruling["outcome"]]
    ours, theirs = (
        [{field: ruling[field] for field in fields} for ruling in rulings if ruling["metric"] not in NOT_COMPARED]
        for rulings in (decision["rulings"], expected["rulings"])
    )
    assert_same(ours, theirs, ("workload", "implementation", "metric"))
