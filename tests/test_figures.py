"""The figures in the README are those of results/gallery, to the letter."""

import importlib.util
import re
from pathlib import Path

from harness.store import read

ROOT = Path(__file__).parents[1]


def figures():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_what_the_gallery_holds():
    found = figures()
    readme = found.README.read_text(encoding="utf-8")
    assert readme == found.renewed(readme, found.blocks(read(found.QUICK))), "run: python docs/figures.py"


def test_the_method_tells_what_acceptance_found():
    found = figures()
    text = found.METHOD.read_text(encoding="utf-8")
    assert text == found.renewed(text, {"acceptance": found.accepted()}), "run: python docs/figures.py"
    told = found.accepted()
    assert re.search(r"^Passed: \d+ of \d+\.", told)
    assert all(f"| T{number} | " in told for number in range(1, 17))


def test_the_page_of_the_gallery_shows_what_the_gallery_holds():
    found = figures()
    assert found.PAGE.read_text(encoding="utf-8") == found.page(), "run: python docs/figures.py"
    shown = re.findall(r"\]\(([^)]+)\)", found.page())
    assert len(shown) > len(found.RUNS) + len(found.OTHERS)
    assert all((found.GALLERY / name).exists() for name in shown)


def test_the_pictures_of_the_readme_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [part.split(")")[0] for part in readme.split("](results/")[1:]]
    assert shown
    assert all((ROOT / "results" / name).exists() for name in shown)


def test_the_gallery_can_be_drawn_again_from_its_journal(tmp_path):
    from harness.reports.latency_plot import REPORT

    (REPORT.write(read(ROOT / "results" / "gallery" / "quick"), tmp_path))
    again = (tmp_path / "latency_plot.svg").read_text(encoding="utf-8")
    kept = (ROOT / "results" / "gallery" / "quick" / "latency_plot.svg").read_text(encoding="utf-8")
    assert again.count("<path") == kept.count("<path")
