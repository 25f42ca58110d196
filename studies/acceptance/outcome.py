"""What an acceptance test found."""

from collections.abc import Iterable

import msgspec

Row = dict[str, float | str]
Stored = dict[str, float | str | None]
"""A row in JSON, which has no infinity: a number that is null stands for one."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One test's result: the limit was fixed before the test ran, and what misses it is printed as a miss."""

    id: str  # T1 to T16
    title: str  # what is tested, in a few words
    limit: str  # what was asked, in words with numbers
    found: str  # what was seen, in words with numbers
    passes: bool
    is_short: bool = False  # made with fewer repetitions than the limit asks for
    rivals: dict[str, str] = {}  # by tool, what it showed in the same session
    rows: tuple[Row, ...] = ()  # raw numbers behind it, for the tables and pictures
    cause: str = ""  # of a miss, where it is known
    made: str = ""  # when the last of its pieces was made, in UTC, and of which commits


def restored(rows: Iterable[Stored]) -> list[Row]:
    """Rows that were read from JSON, as they were."""
    return [{name: float("inf") if value is None else value for name, value in row.items()} for row in rows]
