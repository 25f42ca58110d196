"""The recipes of CONTRIBUTING.md fit today's code: all are applied in one copy, and their additions are there.

test_recipes.py and test_documents.py also run them, which takes minutes.
"""

import os
import subprocess
from pathlib import Path

from tests import forks, recipes

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


def test_every_recipe_fits_the_code(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    recipes.copy_project(folder)
    for what in recipes.recipes():
        recipes.apply(what, folder)
    path = os.pathsep.join([str(folder / "harness"), str(folder)])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [forks.python(), "-c", ADDED], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
