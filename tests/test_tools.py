"""Tools of lint: retired words are found in texts for readers alone, and numbers may only fall."""

import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

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


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("page.md", "canary_share, precanary and a_canary", []),
        ("page.md", "what one would\nsee here", ["1: would see"]),
        ("page.md", "<!-- begin table -->\ncanary\n<!-- end table -->\ncanary\n", ["4: canary"]),
        ("page.md", "{{ canary }}\n{% for canary in\n canaries %} a canary", ["3: canary"]),
        ("page.md", "an e-value of 20", ["1: e-value"]),
        ("module.py", '"""Module.\n\nA canary.\n"""\nprint(f"{1} canary {2}")', ["3: canary", "5: canary"]),
        ("module.py", 'def f():\n    """A canary."""', ["2: canary"]),
        ("module.py", 'def _f():\n    """A canary."""\n    return "canary"', ["3: canary"]),
        ("module.py", 'a = {"canary": 1}\nb = a["canary"]', []),
        ("module.py", "canary = 1  # a canary", []),
        ("module.py", '"""An e-value."""\nFIELD = 1\n"""An e-value."""\n', []),
        ("module.py", '"""An e-value."""\nprint("the e-value")', ["2: e-value"]),
        ("module.py", 'print("they would "\n      "see")', ["1: would see"]),
        ("storage/events.py", 'a = "canary"\nb = "they would see"', ["2: would see"]),
        ("processes/events.py", 'a = "canary"', ["1: canary"]),
    ],
)
def test_words_are_found_where_people_read_unless_a_file_is_exempt(tmp_path, name, text, expected):
    (tmp_path / "table.in").write_text(TABLE, encoding="utf-8")
    path = tmp_path / "checked" / name
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    hits = retired_words.check(tmp_path / "checked", retired_words.load(tmp_path / "table.in"))
    assert [f"{hit.line}: {hit.word}" for hit in hits] == expected


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
):
    """Of a function."""
    text = """two
lines"""
    return text
'''


def test_docstrings_comments_and_blank_lines_are_free():
    assert ratchet.code_lines(SOURCE) == 1 + 1 + 3 + 2 + 1  # import, constant, signature, a string that is code, return


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("a.py", '"""Of a thing."""\n', 1),
        ("a.py", '"""What is left of it."""\n', 2),  # an opening and a phrase
        ("a.py", '"""The rest."""\nX = "who has no such thing"\n', 1),
        ("a.py", '"""So many that none is left."""\n', 1),  # only its opening
        ("a.md", "A page.\n\n```console\nwhat is this\n```\n\nwho is that\n", 1),  # a console is no text
    ],
)
def test_stilted_phrases_are_counted(tmp_path, name, text, number):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert ratchet.stilted(tmp_path / name) == number


def test_inner_comprehensions_and_long_functions_are_counted(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("A = [[y for y in x] for x in sum((z for z in B), [])]\nC = [x for x in A]\n", encoding="utf-8")
    assert ratchet.nested_comprehensions(path) == 2  # the list in the element, and the generator in the source
    body = "    x = 1\n" * ratchet.MOST_FUNCTION_LINES
    path.write_text(f"def f():\n{body}def g():\n    x = 1\n", encoding="utf-8")
    assert ratchet.long_functions(path) == 1


def test_a_limit_is_lowered_and_never_raised(tmp_path):
    limits = tmp_path / "limits.toml"
    limits.write_text(
        '[code]\n"a" = { limit = 9, goal = 1 }\n"b" = { limit = 2, goal = 1 }\n[stilted]\n', encoding="utf-8"
    )
    ratchet.renew([ratchet.Count("code in a", 5, 9, 1), ratchet.Count("code in b", 4, 2, 1)], limits)
    assert {name: each["limit"] for name, each in ratchet.load(limits)["code"].items()} == {"a": 5, "b": 2}
    assert not ratchet.Count("code in b", 4, 2, 1).is_fine


def test_lint_refuses_files_which_it_would_ignore(monkeypatch):
    monkeypatch.setitem(sys.modules, "nox", MagicMock(session=lambda made: made))  # the tests need no nox
    session = MagicMock(posargs=["harness/attnbench/units.py"])
    session.error.side_effect = SystemExit
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "noxfile.py"))["lint"](session)
    assert "leave out what follows --" in session.error.call_args.args[0]
    assert not session.run.called


def test_limits_are_near_todays_numbers():
    counts = ratchet.counts(ROOT, ratchet.load())
    far = [str(each) for each in counts if each.limit > 1.2 * each.number + 5]
    assert counts
    assert not far, "python -m tools.ratchet --renew lowers these limits"
