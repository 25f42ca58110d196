"""The page on CUDA names tests, and each of them exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=str)
def test_a_test_that_the_page_names_exists(file, test):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def test_each_item_has_a_test_and_no_test_is_named_twice():
    page = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
    text = page.partition("## What was wrong")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line[:2] == "| "]
    numbers = [int(line.split("|")[1]) for line in rows if line.split("|")[1].strip().isdigit()]
    assert numbers == list(range(1, 15))
    assert len(NAMED) == len(set(NAMED)) == len(rows) - 2  # without the head
