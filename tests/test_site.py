"""The pages of the documentation site: staged with all links, and with a reference generated from the code."""

import importlib.util
import re
from pathlib import Path

import pytest

from attnbench import plugins
from attnbench.explained import KINDS, explanations
from attnbench.storage.records import Status

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "site.py"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="the documents are not here")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("site_pages", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PAGES = tmp_path_factory.mktemp("site") / "pages"
    module.stage()
    return module.PAGES


def test_every_page_of_the_navigation_is_there_and_every_document_is_in_it(pages):
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = re.findall(r"^ +- (?:[^:]+: )?(\S+\.md)$", text, re.MULTILINE)
    assert len(navigation) > 15
    assert [name for name in navigation if not (pages / name).is_file()] == []
    documents = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert documents <= set(navigation)


def test_the_reference_has_every_command_and_every_part_of_a_journal(pages):
    commands = (pages / "reference" / "commands.md").read_text(encoding="utf-8")
    for name in plugins.plugs("attnbench.commands", "COMMAND"):
        assert f"## attnbench {name}\n" in commands
    assert "--budget" in commands
    assert "| 3 | inconclusive" in commands
    journal = (pages / "reference" / "journal.md").read_text(encoding="utf-8")
    for part in ("RunStarted", "CellChecked", "VisitFinished", "Plan", "Workload", "Status"):
        assert f"## {part}\n" in journal
    assert all(f"`{status}`" in journal for status in Status)
    report = (pages / "reference" / "verdict.md").read_text(encoding="utf-8")
    for part in ("Report", "Implementation", "Cell", "Speed", "Choice", "Next"):
        assert f"## {part}\n" in report


def test_each_word_has_a_place_of_its_own_with_four_parts(pages):
    listed = (pages / "reference" / "words.md").read_text(encoding="utf-8")
    for kind in KINDS:
        entries = (pages / "reference" / "words" / f"{kind}.md").read_text(encoding="utf-8").split("\n## ")[1:]
        expected = [each for each in explanations() if each.kind == kind]
        places = [re.match(r"`(.+)` \{#(.+)\}\n", entry).groups() for entry in entries]
        assert [name for name, _ in places] == [each.name for each in expected]
        assert len(dict(map(reversed, places))) == len(places)
        for (name, place), entry, each in zip(places, entries, expected, strict=True):
            assert f"[{name}](words/{kind}.md#{place})" in listed
            parts = (
                f"\n\n{each.means}\n",
                f"matters**: {each.why}\n",
                f"Example**: `` {each.example} ``\n",
                f"do**: {each.do}\n",
            )
            assert [part for part in parts if part not in entry] == []
