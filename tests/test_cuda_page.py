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


def test_no_test_is_named_twice():
    assert len(NAMED) == len(set(NAMED)) > 0
