"""The field: each entry can be imported, and each package has its version."""

import re
import tomllib
from pathlib import Path

import pytest

from attnbench import plugins

FIELD = Path(__file__).parent.parent / "examples" / "field"
PACKAGES = tomllib.loads((FIELD / "field.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("package", PACKAGES)
def test_each_entry_is_in_its_file(package: str) -> None:
    reported = PACKAGES[package]
    plugins.check_specs(f"{FIELD / reported['file']}:{name}" for name in reported["entries"])


def test_every_file_takes_part_and_every_package_has_a_version() -> None:
    assert {reported["file"] for reported in PACKAGES.values()} == {file.name for file in FIELD.glob("from_*.py")}
    text = (FIELD / "requirements.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([\w-]+)==", text, re.MULTILINE))
    assert set(PACKAGES) - {"torch"} <= pinned
