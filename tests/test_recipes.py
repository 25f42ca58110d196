"""The recipes of CONTRIBUTING.md in a copy: all fit the code, and a new axis, metric and report show everywhere.

test_documents.py tests that the blocks run.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from tests import forks, recipes

ROOT = Path(__file__).parent.parent
SWEEP = """
summary = "two values of the new axis, and the new metric"
metrics = ["latency", "autograd_memory"]
budget_s = 1.0

[[grid]]
direction = "forward"
spread = [1.0, 4.0]
seq_len = [16, 32]
head_dim = 8
num_threads = 1
"""
ADDED = """
from attnbench import explained, plugins
from attnbench.checking.mistakes import catalogue
from attnbench.reports import Report
from attnbench.reports.fastest import REPORT
from attnbench.workloads.masks import parse_mask
from attnbench.workloads.workload import Workload

assert Workload(spread=4.0).axes()["spread"] == 4.0
assert "powers_of_ten" in {each.name for each in catalogue(Workload())}
assert isinstance(REPORT, Report)
assert parse_mask("symmetric_window(3)").num_visible(1, 6, 6)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the three recipes applied."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("harness", "implementations", "tests", "studies", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for what in ("axis", "metric", "report"):
        recipes.apply(what, folder)
    (folder / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    return folder


def command(arguments: list[str], folder: Path, allowed: tuple[int, ...] = (0,)) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment |= {"PYTHONPATH": f"{folder / 'harness'}{os.pathsep}{folder}", "COLUMNS": "120", "MPLBACKEND": "agg"}
    environment |= {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode in allowed, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_recipe_fits_the_code(tmp_path: Path) -> None:
    recipes.copy_project(tmp_path / "copy")
    for what in recipes.recipes():
        recipes.apply(what, tmp_path / "copy")
    command([forks.python(), "-c", ADDED], tmp_path / "copy")


GROUPS = ("B=1 H=8 K=8, num_threads=1", "B=1 H=8 K=8, num_threads=1, spread=4")
BYTES = r"[\d.]+ ([KM]iB|B)"


@pytest.mark.long
def test_a_new_axis_a_metric_and_a_report_show_everywhere(copy: Path) -> None:
    arguments = ["run", "-v", "--sweep", "sweep.toml", "--implementation", "fused", "--implementation", "sdpa"]
    terminal = command([forks.python(), "-m", "attnbench", *arguments], copy, (0, 3))  # 3: a busy machine decides less
    (run,) = (copy / "results" / "runs").iterdir()
    for group in GROUPS:
        table = terminal.partition(f"{group}\n")[2].partition("\n\n")[0]
        assert "autograd memory" in table
        rows = [line for line in table.splitlines() if re.match(r"(16|32) +(fused|sdpa) ", line)]
        assert len(rows) == 4
        assert all(re.search(rf"  {BYTES}", line) for line in rows), table
    _has_rows(pd.read_csv(run / "records.csv"))
    _has_tables((run / "summary.md").read_text(encoding="utf-8"))
    _has_panels((run / "report.html").read_text(encoding="utf-8"))
    assert len((run / "fastest.txt").read_text(encoding="utf-8").splitlines()) == 4
    chosen = "promised or writes or same_at_every_call or without_records or nothing_is_ok"
    options = ["-q", "-p", "no:cacheprovider", "-k", f"({chosen}) and not plot"]
    command([forks.python(), "-m", "pytest", *options, "tests/reports/test_reports.py"], copy)


def _has_rows(cells: pd.DataFrame) -> None:
    assert sorted(cells["spread"]) == [1.0] * 4 + [4.0] * 4
    assert not cells.duplicated(["spread", "seq_len", "implementation"]).any()
    assert (cells["autograd_memory_bytes"] > 0).all()
    baseline = cells[cells["is_baseline"]].set_index(["spread", "seq_len"])["latency_s"]
    for cell in cells[~cells["is_baseline"]].itertuples():
        assert cell.paired_latency_s == pytest.approx(cell.ratio * baseline[cell.spread, cell.seq_len])


def _has_tables(summary: str) -> None:
    for group in GROUPS:
        (table,) = re.findall(rf"^### [^\n]*{group}\n\n(\|.*?)\n\n", summary, re.MULTILINE | re.DOTALL)
        heading, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        place = heading.index("autograd memory")
        cells = [(length, name) for length in ("16", "32") for name in ("fused", "sdpa")]
        assert sorted((row[0], row[1]) for row in rows) == cells
        assert all(re.match(rf"{BYTES} \([\d.]+ S\)", row[place]) for row in rows)
    assert "memory that autograd keeps of a forward call" in summary


def _has_panels(page: str) -> None:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(text)
    place = [column["heading"] for column in data["columns"]].index("autograd memory")
    panels = [f"{label}T={length}" for label in ("", "spread=4 ") for length in (16, 32)]
    found = [(row["panel"], row["implementation"]) for row in data["rows"]]
    assert sorted(found) == sorted(itertools.product(panels, ("fused", "sdpa")))
    assert all(re.match(rf"{BYTES} \([\d.]+ S\)", row["text"][place]) for row in data["rows"])
