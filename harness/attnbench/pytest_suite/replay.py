"""A run, and a clock that plays the samples of one of its cells again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attnbench.analysis.results import read
from attnbench.analysis.table import metric_columns, rows, table
from attnbench.commands.running import watching, write_reports
from attnbench.plugins import name_of
from attnbench.processes.execution import execute, new_folder
from attnbench.storage.events import Plan
from attnbench.storage.records import Record
from attnbench.workloads.workload import Workload

COMPARED = ("ratio", "ratio_low", "ratio_high", "verdict", "minimum_detectable_effect")


@dataclass(frozen=True)
class Cell:
    """A workload and the implementation that a test is about."""

    workload: Workload
    spec: str

    def __str__(self) -> str:
        """What stands between the brackets of the test's name."""
        return f"{name_of(self.spec)}-{self.workload.id}"


class ReplayClock:
    """A timer whose time passes only when a sample is played: pytest-benchmark then finds the sample's value."""

    def __init__(self) -> None:
        """Nothing to play yet."""
        self._now_s = 0.0
        self._samples: Iterator[float] = iter(())

    def load(self, samples: Sequence[float]) -> None:
        """Seconds per call, to be played in this order."""
        self._samples = iter(samples)

    def play(self) -> None:
        """Let as much time pass as the next sample took; none after the last."""
        self._now_s += next(self._samples, 0.0)

    def __call__(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s


class Measured:
    """A finished run: its records by cell."""

    def __init__(self, planned: Plan, cells: Sequence[Cell], results: Path) -> None:
        """Run those cells, and the baseline on their workloads; write the reports."""
        workloads = tuple(dict.fromkeys(cell.workload for cell in cells))
        chosen = {cell.spec for cell in cells}
        specs = tuple(s for s in planned.implementations if s in chosen or name_of(s) == planned.baseline)
        asked = msgspec.structs.replace(planned, workloads=workloads, implementations=specs)
        folder = new_folder(results, f"{planned.sweep}-pytest")
        with watching() as watch:
            execute(asked, folder, watch)
        found = read(folder)
        write_reports(found, folder)
        self._records = {(record.workload.id, record.implementation): record for record in found.records}
        self._rows = {(row["workload"], row["implementation"]): row for row in rows(table(found))}
        self._metrics = metric_columns(found)
        self._baseline = planned.baseline

    def record(self, cell: Cell) -> Record:
        """All that is known of the cell."""
        return self._records[cell.workload.id, name_of(cell.spec)]

    def extra_info(self, cell: Cell) -> dict[str, Any]:
        """What is shown with the times: the verdict and its numbers, and every metric that was measured."""
        row = self._rows[cell.workload.id, name_of(cell.spec)]
        found: dict[str, Any] = {"run": row["run"], "status": row["status"]}
        if row["verdict"] is not None:
            found |= {"baseline": self._baseline} | {column: row[column] for column in COMPARED}
        return found | {each.name: row[each.name] for each in self._metrics if row[each.name] is not None}
