"""Tools of lint: retired words are found in texts for readers alone, and numbers may only fall."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import ratchet, retired_words

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
        ('"""Module.\n\nA canary.\n"""\nprint(f"{1} canary {2}")', ["3: canary", "5: canary"]),
        ('def f():\n    """A canary."""', ["2: canary"]),
        ('def _f():\n    """A canary."""\n    return "canary"', ["3: canary"]),
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


def test_the_command_prints_each_hit_and_fails(tmp_path):
    (tmp_path / "page.md").write_text("fine\nthe canary was told\n", encoding="utf-8")
    command = [sys.executable, "-m", "tools.retired_words", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    first, second = done.stdout.splitlines()
    assert first.startswith("page.md:2: canary -> interference probe")
    assert second.startswith("page.md:2: told -> ")
    assert done.returncode == 1


SOURCE = '''"""A module.

With a long docstring.
"""

import os  # a reason

# a comment alone
LIMIT = 3
"""What is documented is free."""


def function(
    first,
    second,
):
    """Of a function."""
    text = """two
lines"""
    return text
'''


def test_docstrings_comments_and_blank_lines_are_free():
    assert ratchet.code_lines(SOURCE) == 1 + 1 + 4 + 2 + 1  # import, constant, signature, a string that is code, return


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('"""Of a thing."""\n', 1),
        ('"""What is left of it."""\n', 2),  # an opening and a phrase
        ('"""The rest."""\nX = "who has no such thing"\n', 1),
        ('"""So many that none is left."""\n', 1),  # only its opening
    ],
)
def test_stilted_phrases_are_counted(tmp_path: Path, source: str, number: int):
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    assert ratchet.stilted(tmp_path / "a.py") == number


def test_what_a_console_shows_is_no_text(tmp_path: Path):
    (tmp_path / "a.md").write_text("A page.\n\n```console\nwhat is this\n```\n\nwho is that\n", encoding="utf-8")
    assert ratchet.stilted(tmp_path / "a.md") == 1


def test_a_limit_is_lowered_and_never_raised(tmp_path: Path):
    limits = tmp_path / "limits.toml"
    limits.write_text(
        '[code]\n"a" = { limit = 9, goal = 1 }\n"b" = { limit = 2, goal = 1 }\n[stilted]\n', encoding="utf-8"
    )
    ratchet.renew([ratchet.Count("code in a", 5, 9, 1), ratchet.Count("code in b", 4, 2, 1)], limits)
    assert {name: each["limit"] for name, each in ratchet.load(limits)["code"].items()} == {"a": 5, "b": 2}
    assert not ratchet.Count("code in b", 4, 2, 1).is_fine
