"""The README as a code host shows it: name, question, install, one run and one picture are on the first screen."""

import os
import re
from pathlib import Path

import pytest

from tests.browser.chromium import Browser

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT, COLUMN = 1200, 900, 830
"""The window, and the width of the text column next to a host's sidebar."""
STYLE = f"""
body {{ font: 16px/1.5 "Noto Sans", Helvetica, Arial, sans-serif; max-width: {COLUMN}px; margin: 0; padding: 32px; }}
body {{ box-sizing: content-box; }}
h1, h2 {{ line-height: 1.25; margin: 24px 0 16px; padding-bottom: .3em; border-bottom: 1px solid #d1d9e0; }}
h1 {{ font-size: 2em; margin-top: 0; }}
h2 {{ font-size: 1.5em; }}
p, pre {{ margin: 0 0 16px; }}
pre {{ padding: 16px; font-size: 13.6px; line-height: 1.45; background: #f6f8fa; border-radius: 6px; overflow: auto; }}
code {{ font-family: "DejaVu Sans Mono", monospace; }}
img {{ max-width: 100%; }}
"""
BADGE = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='90' height='20'></svg>"


@pytest.fixture
def page(tmp_path):
    markdown = pytest.importorskip("markdown")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    html = markdown.markdown(text, extensions=["fenced_code", "tables"])
    for each in found:  # a badge comes from the network: a box of its size replaces it
        there = f"file://{ROOT / each}" if (ROOT / each).is_file() else BADGE
        html = html.replace(f'src="{each}"', f'src="{there}"')
    file = tmp_path / "readme.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{html}", encoding="utf-8")
    with Browser() as browser:
        browser.resize(WIDTH, HEIGHT)
        browser.open(f"file://{file}")
        browser.wait("[...document.images].every((each) => each.complete && each.naturalWidth > 0)")
        yield browser


def test_the_first_screen_has_the_install_a_run_and_a_picture(page):
    if folder := os.environ.get("ATTNBENCH_PICTURES"):
        page.picture(Path(folder).parent / "report" / "readme.png")
    before = (
        "[...document.body.children].slice(0, [...document.body.children].findIndex((each) => each.tagName === 'H2'))"
    )
    assert page.run(f"{before}.filter((each) => each.tagName === 'PRE').length") == 2
    assert page.run("[...document.images].filter((each) => each.naturalWidth > 500).length") == 1
    picture = "[...document.images].find((each) => each.naturalWidth > 500)"
    assert page.run(f"{picture}.getBoundingClientRect().bottom") <= HEIGHT
    assert page.run(
        "[...document.querySelectorAll('pre')].slice(0, 2).every((each) => each.scrollWidth <= each.clientWidth)"
    )
