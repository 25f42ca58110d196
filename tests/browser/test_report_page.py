"""The page of a report in a browser without a network, as its readers use it.

Run by `nox -s browser`. With ATTNBENCH_PICTURES=DIR it writes pictures below DIR/../report, and the time of each change
of the view with 10,000 cells.

Source: axe-core, https://github.com/dequelabs/axe-core, finds problems for keyboards and screen readers.
"""

import os
import re
from pathlib import Path

import pytest
from PIL import Image

from attnbench.analysis.results import read
from attnbench.reports import summary
from tests import journals
from tests.browser.chromium import Browser

pytestmark = pytest.mark.browser
PHONE = 390
QUICK = Path(__file__).parents[2] / "results" / "gallery" / "quick"
MANY = journals.workloads(
    mask=("none", "causal"),
    dtype=("float32", "float64", "float16", "bfloat16"),
    num_heads=(1, 2, 4, 8, 12, 16, 32, 64),
    seq_len=tuple(range(64, 64 * 17, 64)),
)
PRINTED = (210 / 25.4, 297 / 25.4)
POINTS = journals.workloads(scope=("attention", "module"), mask=("none", "causal"), seq_len=(128, 512, 2048))
VERDICTS = "[...document.querySelectorAll('#table tbody td.verdict')].map((each) => each.textContent)"
NAMES = "[...document.querySelectorAll('#table tbody th')].map((each) => each.textContent)"
COUNT = "document.querySelector('#table caption').textContent"
HEADING = "[...document.querySelectorAll('#table thead button')].find((each) => each.textContent === {!r})"
MENU = (
    "[...document.querySelectorAll('#controls > label')].find((each) => each.textContent.startsWith({!r}))"
    ".querySelector('select')"
)
CHANGE = (
    "(() => {{ const menu = {menu}; menu.value = {value!r}; menu.dispatchEvent(new Event('change')); return true; }})()"
)
BOX = "[...document.querySelectorAll('{} label')].find((each) => each.textContent === {!r}).firstChild"


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "single.html").write_text(summary.html_page(journals.write(folder / "one", POINTS)), encoding="utf-8")
    return folder


@pytest.fixture
def page(browser, files):
    browser.requests.clear()
    browser.resize(1200, 900)
    browser.prefer("light")
    load(browser, files / "single.html")
    yield browser
    require_no_trouble(browser)


def require_no_trouble(browser):
    """No script failed, the console is empty, and no other machine was contacted."""
    assert browser.problems == []
    outside = [each for each in browser.requests if not each.startswith(("file:", "data:", "about:", "blob:"))]
    assert outside == []


def load(browser, file, fragment=""):
    browser.open("about:blank")
    browser.open(f"file://{file}{fragment}")
    browser.wait("document.querySelector('#chart svg path')")


def choose(page, label, value):
    page.run(CHANGE.format(menu=MENU.format(label), value=value))


def picture(page, name, at="header"):
    page.run(f"document.querySelector({at!r}).scrollIntoView()")
    if folder := os.environ.get("ATTNBENCH_PICTURES"):
        page.picture(Path(folder).parent / "report" / f"{name}.png")


def test_the_first_screen_has_the_answer(page):
    height = page.run("document.getElementById('answer').getBoundingClientRect().bottom")
    assert 0 < height < 900
    assert page.run("document.querySelector('.advice').getBoundingClientRect().bottom") < 900
    assert page.run("document.querySelector('.cards').getBoundingClientRect().top") < 900
    assert page.run("document.getElementById('environment').getBoundingClientRect().top") > 900
    picture(page, "first_screen")


def ratios(page):
    factors = [re.match(r"([\d.]+)x (slower|faster)", text) for text in page.run(VERDICTS)]
    return [float(each[1]) ** (1 if each[2] == "slower" else -1) for each in factors if each]


def test_a_heading_sorts_the_table_one_way_and_the_other(page):
    page.run(HEADING.format("verdict") + ".focus()")
    page.run("document.activeElement.click()")
    assert len(ratios(page)) > 10
    assert ratios(page) == sorted(ratios(page))
    assert page.run("document.querySelector('[aria-sort=ascending]').textContent") == "verdict"
    page.run("document.activeElement.click()")  # the focus stayed in place
    assert ratios(page) == sorted(ratios(page), reverse=True)
    assert page.run("document.activeElement.textContent") == "verdict"


def test_filters_hold_for_table_and_chart_and_are_in_the_address(page, files):
    every = page.run(COUNT)
    panels = "[...document.querySelectorAll('#chart svg .role-column-title, #chart svg .role-title text')].length"
    choose(page, "seq len", "512")
    choose(page, "mask", "causal")
    few = page.run(COUNT)
    assert few != every
    fragment = page.run("location.hash")
    assert "f.mask=causal" in fragment
    load(page, files / "single.html", fragment)
    assert page.run(COUNT) == few
    assert page.run(MENU.format("mask") + ".value") == "causal"
    assert page.run(panels) <= 2
    page.run("[...document.querySelectorAll('#controls button')].at(-1).click()")
    assert page.run(COUNT) == every
    assert page.run("location.hash") == ""


def test_an_implementation_can_be_switched_off(page):
    assert "fused" in page.run(NAMES)
    page.run(BOX.format("#controls fieldset", "fused") + ".click()")
    assert "fused" not in page.run(NAMES)
    page.wait("![...document.querySelectorAll('#chart svg text')].some((each) => each.textContent === 'fused')")


@pytest.mark.parametrize("view", ["dots", "lines"])
def test_metric_scale_and_view_change_the_chart(page, view):
    choose(page, "Show", view)
    seen = set()
    for metric, scale in (("ratio", "log"), ("time", "linear"), ("memory", "log"), ("error", "linear")):
        choose(page, "Metric", metric)
        choose(page, "Scale", scale)
        page.run("new Promise((done) => setTimeout(done, 400))")
        seen.add(page.run("document.querySelector('#chart svg').innerHTML"))
    assert len(seen) == 4
    picture(page, f"view_{view}", "#controls")


def test_columns_can_be_chosen_and_the_text_searched(page):
    assert page.run("document.querySelectorAll('#table thead th').length") == 5
    page.run(BOX.format("#columns", "error") + ".click()")
    assert page.run(HEADING.format("error") + " !== undefined")
    page.run(
        "(() => { const find = document.getElementById('find'); find.value = 'naive'; "
        "find.dispatchEvent(new Event('input')); })()"
    )
    assert set(page.run(NAMES)) == {"naive_loop"}


LEGEND = "[...document.querySelectorAll('#chart svg .role-legend-label text')].map((each) => each.textContent)"
SIDEWAYS = "[...document.querySelectorAll('.wide')].map((each) => each.scrollWidth > each.clientWidth + 1)"
HINTS = "[...document.querySelectorAll('.hint')].map((each) => !each.hidden)"


def test_the_legend_has_the_drawn_verdicts_and_each_panel_an_axis(page):
    assert set(page.run(LEGEND)) == {"baseline", "equal", "slower"}
    panels = page.run("document.querySelectorAll('#chart svg .role-scope.cell > g').length")
    axes = "[...document.querySelectorAll('#chart svg .role-axis-title text')].map((each) => each.textContent)"
    assert panels == 12
    assert page.run(axes) == ["time / baseline's time, below 1 is faster"] * panels
    choose(page, "seq len", "512")
    choose(page, "mask", "causal")
    choose(page, "scope", "module")
    page.wait("document.querySelectorAll('#chart svg .role-scope.cell > g').length <= 1")
    assert page.run("document.querySelector('#chart svg').clientWidth") > 900  # one panel has the whole width


def test_no_two_implementations_of_the_lines_share_colour_and_shape(page):
    choose(page, "Show", "lines")
    page.wait(f"{LEGEND}.includes('sdpa')")
    symbols = "[...document.querySelectorAll('#chart svg .role-legend-symbol path')]"
    found = page.run(f"{symbols}.map((each) => each.getAttribute('d') + each.getAttribute('fill'))")
    shapes = page.run(f"{symbols}.map((each) => each.getAttribute('d'))")
    assert len(set(found)) == len(found) > 8
    assert len(set(shapes)) == 6  # so that colour is not the only clue


def test_a_table_that_goes_on_says_so_and_keeps_the_names_of_its_rows(page, tmp_path):
    assert page.run(HINTS) == page.run(SIDEWAYS)
    file = tmp_path / "quick.html"
    file.write_text(summary.html_page(read(QUICK)), encoding="utf-8")
    page.resize(900, 900)
    load(page, file)
    assert page.run(HINTS)[0] is page.run(SIDEWAYS)[0] is True
    page.run("document.querySelector('.wide').scrollLeft = 500")
    box = "document.querySelector('{}').getBoundingClientRect().left"
    assert page.run(box.format(".cards tbody th")) == pytest.approx(page.run(box.format(".wide")), abs=2)
    page.resize(PHONE, 844)
    page.wait(f"!{HINTS}.some(Boolean)")
    assert not any(page.run(SIDEWAYS))  # a row is a card there


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, PHONE])
def test_the_page_of_the_gallery_is_as_wide_as_its_screen(page, tmp_path, width, scheme):
    """With ATTNBENCH_PICTURES=DIR its four pictures go below DIR/../quick."""
    file = tmp_path / "quick.html"
    file.write_text(summary.html_page(read(QUICK)), encoding="utf-8")
    page.resize(width, 900)
    page.prefer(scheme)
    load(page, file)
    assert page.run("document.documentElement.scrollWidth") <= width
    rows = page.run("document.querySelectorAll('.cards tbody tr').length")
    assert rows == len(read(QUICK).plan.workloads)
    is_card = page.run("getComputedStyle(document.querySelector('.cards tr')).display === 'block'")
    assert is_card == (width == PHONE)
    inks = "[...document.querySelectorAll('#chart svg .role-axis-label text')].map((each) => each.getAttribute('fill'))"
    light_ink, dark_ink = "#1f2328", "#e6edf3"
    assert set(page.run(inks)) == {dark_ink if scheme == "dark" else light_ink}
    if folder := os.environ.get("ATTNBENCH_PICTURES"):
        kept = Path(folder).parent / "quick" / f"page_{width}_{scheme}.png"
        page.picture(kept)
        with Image.open(kept) as picture:
            picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(kept, optimize=True)
        assert kept.stat().st_size < 200_000


@pytest.mark.parametrize(
    ("width", "scheme", "name"), [(1200, "light", "single"), (1200, "dark", "single"), (PHONE, "dark", "single")]
)
def test_axe_finds_no_serious_violation(page, files, width, scheme, name):
    page.resize(width, 900)
    page.prefer(scheme)
    load(page, files / f"{name}.html")
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found = page.axe()
    assert len(found["passes"]) > 20
    assert [each for each in found["violations"] if each["impact"] in {"serious", "critical"}] == []
    # The check can fail: an image without a text is an error.
    page.run("document.querySelector('main').append(document.createElement('img')); true")
    assert "image-alt" in [each["id"] for each in page.axe()["violations"]]


def test_paper_has_the_answer_and_the_table_and_no_controls(page):
    page.ask("Emulation.setEmulatedMedia", media="print")
    page.resize(int(PRINTED[0] * 96), int(PRINTED[1] * 96))
    visible = "getComputedStyle(document.querySelector({!r})).display !== 'none'"
    shown = ("#answer", "#chart", "#table", "#controls", "details")
    assert [what for what in shown if page.run(visible.format(what))] == ["#answer", "#chart", "#table"]
    assert page.run("document.documentElement.scrollWidth") <= PRINTED[0] * 96
    assert page.run("document.querySelector('#chart svg').getBoundingClientRect().right") <= PRINTED[0] * 96
    assert page.run("document.querySelector('.cards tr').getBoundingClientRect().bottom") < PRINTED[1] * 96
    picture(page, "print")
    page.ask("Emulation.setEmulatedMedia", media="")


def test_ten_thousand_cells_can_be_explored(browser, tmp_path):
    """The drawn part stays bounded, so that each change takes less than a second (the gallery has the times)."""
    run = journals.write(tmp_path / "many", MANY, num_epochs=1, num_visits=3)
    file = tmp_path / "many.html"
    file.write_text(summary.html_page(run), encoding="utf-8")
    browser.requests.clear()
    browser.resize(1200, 900)
    browser.prefer("light")
    load(browser, file)
    cells = int(browser.run(COUNT).split()[0])
    assert cells >= 10_000
    changes = {
        "sort by a column": HEADING.format("verdict") + ".click()",
        "filter by an axis": CHANGE.format(menu=MENU.format("num heads"), value="8"),
        "search the text": "(() => { const find = document.getElementById('find'); find.value = 'bfloat16'; "
        "find.dispatchEvent(new Event('input')); })()",
        "draw lines over length": CHANGE.format(menu=MENU.format("Show"), value="lines"),
        "draw lines of all cells": "[...document.querySelectorAll('#controls button')].at(-1).click(); "
        + CHANGE.format(menu=MENU.format("Show"), value="lines"),
    }
    taken = {}
    for name, change in changes.items():
        seconds = "(performance.now() - start) / 1000"
        script = f"const start = performance.now(); {change}; await window.attnbenchDrawn; return {seconds};"
        taken[name] = browser.run(f"(async () => {{ {script} }})()")
        assert browser.run("document.querySelectorAll('#table tbody tr').length") <= 100
        assert browser.run("document.querySelectorAll('#chart *').length") <= 12_000
    require_no_trouble(browser)
    if folder := os.environ.get("ATTNBENCH_PICTURES"):
        folder = Path(folder).parent / "report"
        rows = [f"| {name} | {seconds:.2f} s |" for name, seconds in taken.items()]
        shown = [f"\n![{each.stem.replace('_', ' ')}]({each.name})" for each in sorted(folder.glob("*.png"))]
        size = file.stat().st_size / 1e6
        text = f"""# The page of a report

Made by `nox -s browser`. A page of {cells:,} cells ({size:.1f} MB) is to answer each change of the view within 1 s:

| change of the view | until the table and the chart show it |
| --- | --- |
"""
        (folder / "README.md").write_text("\n".join([text + "\n".join(rows), *shown, ""]), encoding="utf-8")
