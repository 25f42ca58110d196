"""What an acceptance test found."""

from collections.abc import Iterable

import msgspec

LABELS = {
    "aa_error": "T1",
    "false_alarms": "T2",
    "power": "T5",
    "time_to_verdict": "T6",
    "repeatability": "T7",
    "coverage": "T8",
    "busy_neighbour": "T10",
    "order_and_names": "T11",
    "kills": "T14",
    "overhead": "T15",
    "called_share": "T16",
    "small_slowdown": "T18",
    "small_slowdown_simulated": "T18s",
    "many_cells": "C1",
    "kernel_sum": "G1",
    "cold_caches": "G2",
    "heat_up": "G3",
    "flush": "G4",
    "graph_mode": "G5",
    "same_code": "R1",
    "slowdown": "R2",
    "same_code_apart": "R3",
    "slowdown_apart": "R4",
}
"""The short label of each test, by its name: what tables call it."""
TESTS = {label: name for name, label in LABELS.items()}

Row = dict[str, float | str]
Stored = dict[str, float | str | None]
"""A row in JSON, which has no infinity: a number that is null stands for one."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One test's result: the limit was fixed before the test ran, and what misses it is printed as a miss."""

    id: str  # its label: T1 to T16, ...
    title: str  # what is tested, in a few words
    limit: str  # what was asked, in words with numbers
    found: str  # what was seen, in words with numbers
    passes: bool
    is_short: bool = False  # made with fewer repetitions than the limit asks for
    rivals: dict[str, str] = {}  # by tool, what it showed in the same session
    rows: tuple[Row, ...] = ()  # raw numbers behind it, for the tables and pictures
    cause: str = ""  # of a miss, where it is known
    made: str = ""  # when the last of its pieces was made, in UTC, and of which commits

    @property
    def test(self) -> str:
        """The test's name."""
        return TESTS[self.id]


def restored(rows: Iterable[Stored]) -> list[Row]:
    """Rows that were read from JSON, as they were."""
    return [{name: float("inf") if value is None else value for name, value in row.items()} for row in rows]
