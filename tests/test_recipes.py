"""The recipes of CONTRIBUTING.md in a copy: all fit the code, pass lint, and show everywhere.

test_documents.py tests that the blocks run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests import forks, recipes

SWEEP = """
summary = "two values of the new axis, and the new metric"
metrics = ["latency", "autograd_memory"]
budget_s = 8.0

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
    """A copy of the project with every recipe applied."""
    folder = tmp_path_factory.mktemp("parent") / "copy"
    recipes.copy_project(folder)
    for what in recipes.recipes():
        recipes.apply(what, folder)
    (folder / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    return folder


def command(arguments: list[str], folder: Path, allowed: tuple[int, ...] = (0,), timeout_s: float = 600) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment |= {"PYTHONPATH": f"{folder / 'harness'}{os.pathsep}{folder}", "COLUMNS": "120", "MPLBACKEND": "agg"}
    environment |= {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode in allowed, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_recipe_fits_the_code(copy: Path) -> None:
    command([forks.python(), "-c", ADDED], copy)


PACKAGES = ["harness", "implementations"]
LINT = (
    ["-m", "ruff", "check", *PACKAGES],
    ["-m", "ruff", "format", "--check", *PACKAGES],
    ["-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
)


@pytest.mark.parametrize("arguments", LINT, ids=["style", "format", "imports"])
def test_every_recipe_passes_lint(copy: Path, arguments: list[str]) -> None:
    command([sys.executable, *arguments], copy)


@pytest.mark.long
@pytest.mark.timeout(900)  # nothing is cached: torch's types are read, too
def test_every_recipe_has_types(copy: Path) -> None:
    command([sys.executable, "-m", "mypy", "--package", "attnbench"], copy, timeout_s=900)


@pytest.mark.long
def test_a_new_axis_a_metric_and_a_report_show_everywhere(copy: Path) -> None:
    arguments = ["run", "-v", "--sweep", "sweep.toml", "--implementation", "fused", "--implementation", "sdpa"]
    terminal = command([forks.python(), "-m", "attnbench", *arguments], copy, (0, 3))  # 3: a busy machine decides less
    (run,) = (copy / "results" / "runs").iterdir()
    summary, page = (run / "summary.md").read_text(encoding="utf-8"), (run / "report.html").read_text(encoding="utf-8")
    for text in (terminal, summary):
        for group in ("B=1 H=8 K=8, num_threads=1\n", "B=1 H=8 K=8, num_threads=1, spread=4\n"):
            table = text.partition(group)[2].lstrip().partition("\n\n")[0]
            assert "autograd memory" in table
            assert sum("fused" in line or "sdpa" in line for line in table.splitlines()) == 4
    assert "memory that autograd keeps of a forward call" in summary
    assert all(part in page for part in ('"spread=4 T=16"', '"spread=4 T=32"', '"autograd memory"'))
    cells = pd.read_csv(run / "records.csv")
    assert sorted(cells["spread"]) == [1.0] * 4 + [4.0] * 4
    assert (cells["autograd_memory_bytes"] > 0).all()
    baseline = cells[cells["is_baseline"]].set_index(["spread", "seq_len"])["latency_s"]
    for cell in cells[~cells["is_baseline"]].itertuples():
        assert cell.paired_latency_s == pytest.approx(cell.ratio * baseline[cell.spread, cell.seq_len])
    assert len((run / "fastest.txt").read_text(encoding="utf-8").splitlines()) == 4
    chosen = "promised or writes or same_at_every_call or without_records or nothing_is_ok"
    options = ["-q", "-p", "no:cacheprovider", "-k", f"({chosen}) and not plot"]
    command([forks.python(), "-m", "pytest", *options, "tests/reports/test_reports.py"], copy)
