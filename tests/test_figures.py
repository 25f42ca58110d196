"""Figures in the documents equal results/gallery, to the letter; those about the method equal the code."""

import gzip
import importlib.util
import re
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from attnbench.analysis.results import read
from attnbench.statistics.verdict import Effect, judge
from attnbench.storage.records import Verdict

ROOT = Path(__file__).parents[1]


def figures():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_about_trust_shows_what_became_of_cheats():
    found = figures()
    text = found.TRUST.read_text(encoding="utf-8")
    assert text == found.renewed(text, {"trust": found.tried()}), "run: python docs/figures.py"


def test_the_page_on_fastest_says_what_its_gallery_does():
    text = (ROOT / "docs" / "fastest.md").read_text(encoding="utf-8")
    found = figures()
    assert text == found.renewed(text, {"policy": found.followed()}), "run: python docs/figures.py"


def test_the_method_works_its_example_out_as_the_code_does():
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    seen = Effect(log=0.03, error=0.014 / 8**0.5, degrees=7, num_processes=8, num_measured=8)
    null = Effect(log=0.0, error=0.005, degrees=7, num_processes=8, num_measured=8)
    alone = judge({0: seen})[0]
    among = judge({place: null if place else seen for place in range(64)})[0]
    for judged, level in ((alone, "1 %"), (among, "0.016 %")):
        low, high = (100 * (judged.effect.log + sign * judged.half_width) for sign in (-1, 1))
        assert f"level of {level}" in text or f"level is {level}" in text
        assert f"{100 * judged.level:.2g} %" == level
        assert f"{low:.1f} to {high:.1f} %" in text
        assert f"{judged.half_width / seen.error:.3g}"[:3] in text
    assert (alone.verdict, among.verdict) == (Verdict.slower, Verdict.undecided)


def test_the_method_states_the_share_of_false_verdicts_in_simulations():
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    page = (ROOT / "results/gallery/acceptance/acceptance.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| V2 ") and "without any difference" in line)
    (most,) = re.findall(r"of 10000, 99 % limit ([\d.]+)%", row)
    assert f"{float(most):.1f} %" in text


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


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), dtype=float)


def test_the_gallery_can_be_drawn_again_from_its_journal(tmp_path):
    from attnbench.reports.lines import REPORT

    found = figures()
    (again,) = REPORT["picture"].write(read(found.QUICK), tmp_path)
    found.shrink(again)
    kept = pixels(found.QUICK / "picture.png")
    redrawn = pixels(again)
    assert redrawn.shape == kept.shape, "run: python docs/figures.py quick"
    assert np.abs(redrawn - kept).mean() < 5, "run: python docs/figures.py quick"


def test_the_gallery_is_small_and_reduced_already(tmp_path):
    found = figures()
    shutil.copytree(found.GALLERY, tmp_path / "gallery")
    found.reduce(tmp_path / "gallery")
    before, after = (
        {
            path.relative_to(top): path.read_bytes()
            for path in top.rglob("*")
            if path.is_file() and "parts" not in path.parts
        }
        for top in (found.GALLERY, tmp_path / "gallery")
    )
    assert before == after, "run: python docs/figures.py"
    assert sum(map(len, before.values())) < 4.5e6


def test_what_is_reduced_keeps_its_tables_journals_and_small_pictures(tmp_path):
    found = figures()
    for name in ("summary.md", "records.csv", "latency_plot.svg", "report.html"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    (tmp_path / "journal.jsonl").write_bytes(b"{}\n")
    for name, width in (("latency_plot.png", 2000), ("latency_plot_2.png", 10), ("growth.png", 700)):
        Image.new("RGB", (width, 100), "#0072B2").save(tmp_path / name)
    found.reduce(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "growth.png",
        "journal.jsonl.gz",
        "latency_plot.png",
        "summary.md",
    }
    assert gzip.decompress((tmp_path / "journal.jsonl.gz").read_bytes()) == b"{}\n"
    for name, size in (("latency_plot.png", (1200, 60)), ("growth.png", (700, 100))):
        with Image.open(tmp_path / name) as picture:
            assert (picture.mode, picture.size) == ("P", size)
            assert picture.convert("RGB").getpixel((0, 0)) == (0x00, 0x72, 0xB2)
