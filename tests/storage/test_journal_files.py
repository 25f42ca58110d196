"""A compressed journal that is damaged is named as damaged, wherever the damage lies."""

import gzip
import zlib
from pathlib import Path

import pytest

from attnbench.storage.events import DamagedError
from attnbench.storage.journal import JOURNAL, events

WHOLE = gzip.compress((Path(__file__).parents[1] / "conftest.py").read_bytes())


def middle_flipped() -> bytes:
    """A damaged stream that zlib itself refuses, not only the checksum at its end."""
    for at in range(10, len(WHOLE) - 8):
        found = WHOLE[:at] + bytes([WHOLE[at] ^ 0xFF]) + WHOLE[at + 1 :]
        try:
            gzip.decompress(found)
        except zlib.error:
            return found
        except (EOFError, OSError):
            continue
    raise AssertionError("no such place")


@pytest.mark.parametrize(
    "content",
    [WHOLE[:-20], middle_flipped(), WHOLE[:-8] + bytes(8), b"no gzip at all"],
    ids=["cut short", "damaged stream", "wrong checksum", "not compressed"],
)
def test_a_damaged_compressed_journal_is_named(tmp_path, content):
    path = tmp_path / f"{JOURNAL}.gz"
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"journal\.jsonl\.gz is cut short or damaged"):
        list(events(path))
