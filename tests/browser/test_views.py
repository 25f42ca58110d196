"""Every TensorBoard view draws in a browser that reaches only this machine; the tests look at shapes, not responses.

Run by `nox -s browser`. With ATTNBENCH_PICTURES=DIR it writes a picture of each view there.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.browser.chromium import Browser

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
VIEWS = 1  # the list of views, below the list of runs
NOTES = ("/favicon.ico", "'slider-vertical'", "crbug.com/1036492")
"""TensorBoard has no icon, and its trace viewer uses features that Chromium will drop."""
GROUP_BY = 4  # behind the lists of workers and spans
NAMES = ["fused", "module_list", "sdpa"]
SIZES = ["--set", "device=cpu"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "harness"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Trace three implementations and serve them, by the commands themselves."""
    folder = tmp_path_factory.mktemp("traces")
    chosen = [option for name in NAMES for option in ("-i", name)]
    command = [sys.executable, "-m", "attnbench"]
    made = subprocess.run([*command, "profile", *chosen, *SIZES], cwd=folder, env=ENVIRONMENT, check=False)
    assert made.returncode == 0
    serving = [*command, "tensorboard", "--port", "0"]
    with subprocess.Popen(serving, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as board:
        assert board.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", board.stdout.readline())
        assert found is not None
        yield found[0]
        board.terminate()


@pytest.fixture(scope="module")
def page(address):
    with Browser() as browser:
        browser.open(f"{address}data/plugin/pytorch_profiler/index.html")
        browser.wait(f"document.body.innerText.includes({json.dumps(NAMES[0])})")
        yield browser
        outside = [each for each in browser.requests if not each.startswith((address, "data:", "about:", "blob:"))]
        assert outside == []
        problems = [each for each in browser.problems if not any(note in each for note in NOTES)]
        assert problems == []


def middle(page, element):
    return page.wait(
        f"(() => {{ const it = {element}; if (!it) return null; const box = it.getBoundingClientRect(); "
        "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )


def choose(page, number, option):
    """Choose an option of the list with this number: a run, WORKLOAD/NAME, by its name."""
    page.press(*middle(page, f"document.querySelectorAll('[aria-haspopup=listbox]')[{number}]"))
    is_it = f"`/${{each.innerText.trim()}}`.endsWith({json.dumps(f'/{option}')})"
    page.press(*middle(page, f"[...document.querySelectorAll('li[role=option]')].find((each) => {is_it})"))
    page.wait("!document.querySelector('li[role=option]')")


def shapes(page, kind):
    """Count the drawn shapes of a kind: with an area, and inside their chart's."""
    return page.wait(
        "[...document.querySelectorAll('svg.marks')].flatMap((svg) => {"
        "  const frame = svg.getBoundingClientRect();"
        f"  return [...svg.querySelectorAll({json.dumps(kind)})].filter((each) => {{"
        "    const box = each.getBoundingClientRect();"
        "    return box.width > 2 && box.height > 2 && box.left >= frame.left - 1 && box.right <= frame.right + 1"
        "      && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;"
        "  });"
        "}).length"
    )


def keep_picture(page, name):
    if folder := os.environ.get("ATTNBENCH_PICTURES"):
        page.picture(Path(folder) / f"{name}.png")


def test_operator_draws_shares_and_a_table_with_call_stacks(page):
    choose(page, VIEWS, "Operator")
    page.wait("document.body.innerText.includes('View CallStack')")
    assert shapes(page, ".mark-arc path") >= 6  # two rings
    table = page.run("document.querySelector('.ant-table').innerText")
    assert "aten::addmm" in table
    keep_picture(page, "operator")
    choose(page, GROUP_BY, "Operator + Input Shape")
    page.wait("document.querySelector('.ant-table').innerText.includes('Input Shape')")
    page.wait("/\\[\\[\\d+(, \\d+)+\\]/.test(document.querySelector('.ant-table').innerText)")
    page.press(
        *middle(page, "[...document.querySelectorAll('button, a, span')].find((e) => e.innerText === 'View CallStack')")
    )
    page.press(*middle(page, "[...document.querySelectorAll('td *')].find((e) => e.innerText === 'View call frames')"))
    page.wait("document.body.innerText.includes('capture.py')")
    keep_picture(page, "call_stack")


def test_trace_draws_the_steps(page):
    choose(page, VIEWS, "Trace")
    frame = "document.querySelector('iframe').contentDocument"
    page.wait(f"document.querySelector('iframe') && {frame}.querySelector('tr-ui-timeline-view')")
    page.wait(f"{frame}.body.innerText.includes('thread')")
    colours = page.wait(
        f"Math.max(...[...{frame}.querySelectorAll('canvas')].filter((each) => each.width && each.height)"
        "  .map((each) => each.getContext('2d').getImageData(0, 0, each.width, each.height).data.buffer)"
        "  .map((buffer) => new Set(new Uint32Array(buffer)).size)) > 5"
    )
    assert colours
    events = f"[...{frame}.querySelector('tr-ui-timeline-view').model.getDescendantEvents()].map((each) => each.title)"
    found = page.wait(events)
    assert {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4", "aten::bmm", "aten::_softmax"} <= set(found)
    assert any("fused" in title for title in found)  # frames of the function itself
    time.sleep(2)  # until it has zoomed in
    keep_picture(page, "trace")


def test_the_front_page_leads_to_the_trace_without_a_network(address):
    """TensorBoard's own page shows the plug-in in a frame, which has the trace viewer in another."""
    with Browser() as browser:
        browser.open(address)
        browser.wait("document.querySelector('tb-webapp') && document.body.innerText.includes('PYTORCH_PROFILER')")
        plugin = "document.querySelector('iframe').contentDocument"
        browser.wait(f"{plugin}.body.innerText.includes({json.dumps(NAMES[0])})")
        list_of_views = f"[...{plugin}.querySelectorAll('[aria-haspopup=listbox]')][{VIEWS}]"
        press = "new MouseEvent('mousedown', {bubbles: true, button: 0})"
        browser.run(f"{list_of_views}.dispatchEvent({press})")
        trace = f"[...{plugin}.querySelectorAll('li[role=option]')].find((each) => each.innerText.trim() === 'Trace')"
        browser.wait(trace)
        browser.run(f"{trace}.click()")
        viewer = f"{plugin}.querySelector('iframe').contentDocument"
        model = f"{viewer}.querySelector('tr-ui-timeline-view').model"
        browser.wait(f"[...{model}.getDescendantEvents()].some((each) => each.title === 'ProfilerStep#2')")
        assert [each for each in browser.requests if not each.startswith((address, "data:", "about:", "blob:"))] == []


@pytest.mark.parametrize(
    ("view", "words", "least"),
    [
        ("Overview", ["Average Step Time"], {".mark-rect path": 3, ".mark-arc path": 1}),  # at least one for each step
        ("Memory", ["Peak Memory Usage"], {".mark-line path": 1}),
        ("Module", ["Forward_0", "Backward_0"], {".mark-rect path": 9}),  # three steps, each with two phases
    ],
)
def test_a_view_draws_its_shapes(page, view, words, least):
    choose(page, VIEWS, view)
    for text in words:
        page.wait(f"document.body.innerText.includes({text!r}) || document.body.textContent.includes({text!r})")
    assert all(shapes(page, kind) >= number for kind, number in least.items())
    keep_picture(page, view.lower())


def test_diff_compares_two_runs(page):
    page.press(*middle(page, "[...document.querySelectorAll('[role=tab]')].find((e) => e.innerText.includes('DIFF'))"))
    for number, name in enumerate(NAMES[:2]):
        for place, option in enumerate((name, name, "default")):  # run, worker, span
            choose(page, 3 * number + place, option)
    assert shapes(page, ".mark-rect path") >= 12  # two sides of two phases in three steps
    keep_picture(page, "diff")
