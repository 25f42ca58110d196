"""Journals of an earlier version load, and give the times, ratios and decisions that the earlier version gave.

Verdicts are judged by today's rules: what was undecided may be decided now, and one in a hundred the other way round.

tests/data/golden holds what commit 3a4cd98 said of them, in full precision: the runs that the gallery had then,
comparisons of two sides in one process and in two (simulated, `x` 8 % slower), and two runs one of which is the other's
baseline (`y` 8 % slower). All are of schema 3, with arms as names. Never regenerate them with later code.
"""

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import attnbench
from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import read
from attnbench.cli import app

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MERGED = {"reference": "same"}  # a kind of ruling that is none of its own any more
CELL = ("workload", "implementation", "side")
EXIT_CODES = {"pass": 0, "improvement": 0, "finding": 1, "inconclusive": 3, "invalid": 4}


def golden(name: str) -> dict:
    return json.loads(gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes()))


def unpacked(name: str, folder: Path) -> Path:
    (folder / name).mkdir()
    (folder / name / "journal.jsonl").write_bytes(gzip.decompress((GOLDEN / f"{name}.jsonl.gz").read_bytes()))
    return folder / name


def cells(run: Path) -> list[dict]:
    compared = {(found.workload.id, found.implementation, found.side): found for found in comparisons(read(run))}
    rows = []
    for row in attnbench.table(run).fillna({"side": ""}).to_dict("records"):
        key = (row["workload"], row["implementation"], row["side"])
        found = compared.get(key)
        rows.append(
            dict(zip(("workload", "implementation", "side"), key, strict=True))
            | {
                "status": row["status"],
                "verdict": None if found is None else str(found.verdict),
                **{name: row[name] for name in ("latency_s", "latency_low_s", "latency_high_s")},
                "ratio": None if found is None else found.ratio,
                "low": None if found is None else found.low,
                "high": None if found is None else found.high,
                "minimum_detectable_effect": None if found is None else found.minimum_detectable_effect,
                "error_ratio": row["error_ratio"],
                "peak_memory_bytes": row.get("peak_memory_bytes"),
            }
        )
    return rows


def assert_same(found: list[dict], expected: list[dict], keys: tuple[str, ...]) -> None:
    """The same rows in any order, texts equal and numbers within 1e-9 of one another."""
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


@pytest.mark.parametrize(
    "name", ["quick", FULL, "compiled", "one_process", "two_processes", "stored_base", "stored_candidate"]
)
def test_cells_are_what_they_were(name, tmp_path):
    expected, found = golden(name)["cells"], cells(unpacked(name, tmp_path))
    assert sum(row["verdict"] is not None for row in expected) >= 4
    then, now = (
        {tuple(row[key] for key in CELL): (row.pop("verdict"), row.pop("minimum_detectable_effect")) for row in rows}
        for rows in (expected, found)
    )
    assert_same(found, expected, CELL)
    changed = [(then[cell][0], now[cell][0]) for cell in then if then[cell][0] != now[cell][0]]
    assert sum(before != "undecided" for before, _ in changed) <= 0.01 * len(then)
    assert all("undecided" in pair for pair in changed), changed
    if not changed:  # what is decided lowers what the others need
        assert [each for _, each in now.values()] == pytest.approx([each for _, each in then.values()], nan_ok=True)


@pytest.mark.parametrize(
    "names", [("one_process",), ("two_processes",), ("stored_base", "stored_candidate")], ids=lambda names: names[-1]
)
def test_the_gate_decides_what_it_did(names, tmp_path):
    expected = golden(names[-1])["gate"]
    paths = [str(unpacked(name, tmp_path)) for name in names]
    done = CliRunner().invoke(app, ["gate", *paths, "--json"])
    decision = json.loads(done.stdout)
    assert decision["outcome"] == expected["outcome"] == "finding"
    assert done.exit_code == EXIT_CODES[expected["outcome"]]
    fields = expected["rulings"][0]
    for ruling in expected["rulings"]:
        ruling["kind"] = MERGED.get(ruling["kind"], ruling["kind"])
    rulings = [{field: ruling[field] for field in fields} for ruling in [*decision["rulings"], decision["suite"]]]
    assert_same(rulings, expected["rulings"], ("workload", "implementation", "metric"))
