"""What was found earlier: the table is renewed row by row, and a test that is run again leaves the others there."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from studies.acceptance.outcome import TESTS, Outcome, Stored, restored

FILE = "acceptance.json.gz"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """All that table and pictures are drawn from."""

    machine: str
    is_short: bool
    outcomes: tuple[Outcome, ...]  # without their rows
    rows: dict[str, tuple[Stored, ...]]  # by test


def save(outcomes: Sequence[Outcome], folder: Path, *, machine: str, short: bool) -> None:
    """Write them whole or not at all."""
    account = Account(
        machine=machine,
        is_short=short,
        outcomes=tuple(msgspec.structs.replace(each, rows=()) for each in outcomes),
        rows={each.test: tuple(dict(row) for row in each.rows) for each in outcomes if each.rows},
    )
    draft = folder / f"{FILE}.draft"
    draft.write_bytes(gzip.compress(msgspec.json.encode(account), mtime=0))
    draft.rename(folder / FILE)


def load(folder: Path, *, machine: str, short: bool) -> dict[str, Outcome]:
    """By test, what is there of this machine and form; a row of another would be no neighbour of today's.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        found = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Account)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it, or get it back from git") from error
    if (found.machine, found.is_short) != (machine, short):
        return {}
    return {
        each.test: msgspec.structs.replace(
            each, rows=tuple(restored(found.rows.get(each.test, found.rows.get(each.id, ()))))
        )
        for each in found.outcomes
        if each.id in TESTS  # those of an earlier method are gone
    }
