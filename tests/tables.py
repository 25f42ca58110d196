"""Cells of a run with their texts in its table, for tests."""

from dataclasses import dataclass
from typing import Any

from attnbench.analysis.results import Results
from attnbench.reports import cells
from attnbench.reports.cells import Cell


@dataclass(frozen=True)
class Shown:
    cell: Cell
    texts: dict[str, str]

    def __getitem__(self, name: str) -> Any:
        """Return the value of an axis, or a field of the record."""
        axes = self.cell.workload.axes() | {"workload": self.cell.workload.id}
        return axes[name] if name in axes else getattr(self.cell, name, getattr(self.cell.record, name, None))


def every(results: Results) -> list[Shown]:
    """Return all cells of the run, in the order of the plan."""
    columns = cells.columns(results)
    return [
        Shown(cell, {column.heading: column.text(cell) for column in columns})
        for cell in cells.all_cells(results).values()
    ]
