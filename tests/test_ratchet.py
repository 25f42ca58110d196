"""Numbers that may only fall are counted as a reader would, and a rise fails."""

from pathlib import Path

import pytest

from tools import ratchet

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
        ('"""A thing that was seen so many times."""\n', 1),
        ('"""What is left of it."""\n', 2),  # an opening and a phrase
        ('"""The rest."""\nX = "who has no such thing"\n', 1),
        ('X = "who has"\n', 0),  # too short to be a text
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
