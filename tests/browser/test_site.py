"""The documentation site, opened from a folder without a network: its search, a phone, and no other requests."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.chromium import Browser

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
PHONE = 390
OPEN = "document.querySelector('.md-search__button')"
SHADOWS = "[...document.querySelectorAll('*')].map((each) => each.shadowRoot).filter(Boolean)"
LINKS = f"{SHADOWS}.flatMap((each) => [...each.querySelectorAll('a')])"


@pytest.fixture(scope="module")
def site():
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("no zensical here: `nox -s browser` installs it")
    path = os.pathsep.join([str(ROOT / "harness"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    for command in (["docs/site.py"], ["-m", "zensical", "build", "--clean"]):
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)
    return ROOT / "build" / "site"


@pytest.fixture
def page(site):
    with Browser() as browser:
        yield browser
        assert browser.problems == []
        assert [each for each in browser.requests if not each.startswith(("file:", "data:", "about:", "blob:"))] == []


def load(page, file):
    page.open(f"file://{file}")
    page.wait("document.readyState === 'complete' && document.querySelector('.md-content')")


def test_search_finds_a_page_without_a_server(page, site):
    load(page, site / "index.html")
    page.run(f"{OPEN}.click()")
    page.wait(f"{SHADOWS}.some((each) => each.activeElement)")
    page.ask("Input.insertText", text="interference")
    assert page.wait(f"{LINKS}.filter((each) => each.href.includes('interference')).length")


NARROW_PICTURES = (
    "[...document.querySelectorAll('.md-content p > img')]"
    ".filter((each) => each.clientWidth < Math.min(600, each.naturalWidth))"
    ".map((each) => each.src)"
)


@pytest.mark.parametrize("width", [PHONE, 1280])
def test_no_page_is_wider_than_its_screen_and_pictures_can_be_read(page, site, width):
    """Tables, code and pictures scroll in boxes."""
    page.resize(width, 844)
    found = sorted(set(site.rglob("*.html")) - {site / "404.html"})  # that one is for a server
    assert len(found) > 50
    for file in found:
        load(page, file)
        assert page.run("document.documentElement.scrollWidth") <= width, file
        assert page.run("[...document.images].every((each) => each.complete && each.naturalWidth > 0)"), file
        assert page.run(NARROW_PICTURES) == [], file
