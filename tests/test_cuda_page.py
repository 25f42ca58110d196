"""Every test that the page on CUDA names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8"))


def test_each_test_that_the_page_names_exists():
    assert len(NAMED) == len(set(NAMED)) > 0
    missing = [name for file, name in NAMED if f"\ndef {name}(" not in (ROOT / file).read_text(encoding="utf-8")]
    assert not missing
