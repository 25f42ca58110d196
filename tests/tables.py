"""Rows of a run's table with their texts, for tests."""

from dataclasses import dataclass
from typing import Any

from attnbench.analysis.results import Results
from attnbench.analysis.table import rows, table
from attnbench.reports.cells import columns


@dataclass(frozen=True)
class Shown:
    """A row, by column, and its texts, by heading."""

    row: dict[str, Any]
    texts: dict[str, str]

    def __getitem__(self, column: str) -> Any:
        return self.row[column]


def every(results: Results) -> list[Shown]:
    """Return all rows of the run, in the order of the plan."""
    return [
        Shown(row, {column.heading: column.text(row) for column in columns(results)}) for row in rows(table(results))
    ]
