"""Retired words are found in texts for readers, and nowhere else."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import retired_words

ROOT = Path(__file__).parents[1]
TABLE = """
skipped = ["old"]
explanations = ["docs/method.md"]

[[word]]
pattern = 'canary|canaries'
use = "interference probe"

[[word]]
pattern = 'would see'
use = "smallest detectable difference"

[[word]]
pattern = 'e-values?'
use = "evidence"
messages_only = true

[[exemption]]
path = "storage/*.py"
pattern = 'canary'
reason = "a name in old journals"
"""


@pytest.fixture
def hits(tmp_path):
    """Write one file, and return the hits in it, without the path."""
    (tmp_path / "table.in").write_text(TABLE, encoding="utf-8")
    table = retired_words.load(tmp_path / "table.in")

    def found(name: str, text: str) -> list[str]:
        path = tmp_path / "checked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return [f"{hit.line}: {hit.word}" for hit in retired_words.check(tmp_path / "checked", table)]

    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The canary is late.", ["1: canary"]),
        ("one\n\nCanaries\n", ["3: Canaries"]),
        ("canary_share, precanary and a_canary", []),
        ("what one would\nsee here", ["1: would see"]),
        ("<!-- begin table -->\ncanary\n<!-- end table -->\ncanary\n", ["4: canary"]),
        ("{{ canary }}\n{% for canary in\n canaries %} a canary", ["3: canary"]),
        ("an e-value of 20", ["1: e-value"]),
    ],
)
def test_a_document_is_read_by_whole_words(hits, text, expected):
    assert hits("page.md", text) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('print("a canary")', ["1: canary"]),
        ('print(f"{1} canary {2}")', ["1: canary"]),
        ('"""Module.\n\nA canary.\n"""', ["3: canary"]),
        ('def f():\n    """A canary."""', ["2: canary"]),
        ('def _f():\n    """A canary."""\n    return "canary"', ["3: canary"]),
        ('class A:\n    def __init__(self):\n        """A canary."""', ["3: canary"]),
        ('a = {"canary": 1}\nb = a["canary"]', []),
        ("canary = 1  # a canary", []),
        ('"""An e-value."""\nFIELD = 1\n"""An e-value."""\n', []),
        ('"""An e-value."""\nprint("the e-value")', ["2: e-value"]),
        ('print("they would "\n      "see")', ["1: would see"]),
    ],
)
def test_python_is_read_by_its_strings(hits, source, expected):
    assert hits("module.py", source) == expected


def test_an_exemption_covers_its_files_and_words_alone(hits):
    assert hits("storage/events.py", 'a = "canary"\nb = "they would see"') == ["2: would see"]
    assert hits("processes/events.py", 'a = "canary"') == ["1: canary", "2: would see"]


def test_skipped_folders_are_not_read(hits):
    assert hits("old/page.md", "canary") == []
    assert hits(".hidden/page.md", "canary") == []


@pytest.mark.parametrize(("field", "text"), [("use", "interference probe"), ("reason", "a name in old journals")])
def test_a_word_needs_a_replacement_and_an_exemption_a_reason(tmp_path, field, text):
    path = tmp_path / "table.in"
    path.write_text(TABLE.replace(f'{field} = "{text}"', f'{field} = ""'), encoding="utf-8")
    with pytest.raises(ValueError, match="needs `use`, and each exemption needs `reason`"):
        retired_words.load(path)


def test_the_command_prints_each_hit_and_fails(tmp_path):
    (tmp_path / "page.md").write_text("fine\nthe canary was told\n", encoding="utf-8")
    command = [sys.executable, "-m", "tools.retired_words", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    first, second = done.stdout.splitlines()
    assert first.startswith("page.md:2: canary -> interference probe")
    assert second.startswith("page.md:2: told -> ")
    assert done.returncode == 1
    (tmp_path / "page.md").write_text("fine\n", encoding="utf-8")
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
