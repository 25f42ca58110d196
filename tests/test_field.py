"""The field: each file holds one implementation of its own name, and each package has its version."""

import importlib.util
import re
from pathlib import Path

import pytest

from attnbench import plugins

FIELD = Path(__file__).parent.parent / "examples" / "field"
SPEC = importlib.util.spec_from_file_location("field_check", FIELD / "check.py")
check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check)
FINDINGS = {"from_monai", "from_transformers"}


@pytest.mark.parametrize("name", check.ENTRIES)
def test_each_file_holds_one_implementation_of_its_name(name: str) -> None:
    assert plugins.held(FIELD / f"{name}.py") == [name]


def test_every_file_takes_part_and_every_package_has_a_version() -> None:
    files = {file.stem for file in FIELD.glob("*.py")} - {"check", "cpu_torchvision"} - FINDINGS
    assert files == set(check.ENTRIES)
    text = (FIELD / "requirements.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([\w-]+)==", text, re.MULTILINE))
    assert {entry["package"] for entry in check.ENTRIES.values()} <= pinned


def test_lines_are_counted_without_imports_comments_and_blank_ones() -> None:
    assert check.num_lines('import a\n\nfrom b import (\n    c,\n)\n\n# why\nx = """\n\ny"""\n') == 3
