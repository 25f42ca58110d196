"""Growth of memory with length: an exponent, a curve, and the length that reaches a limit.

Memory is a count, not a sample: the same call always needs the same bytes.
"""

from dataclasses import dataclass

from attnbench.analysis.results import Results
from attnbench.analysis.table import Panel, panels, rows, table, workload_of
from attnbench.devices import device
from attnbench.statistics.growth import Fit, fit
from attnbench.storage.events import SHARE_OF_FREE
from attnbench.workloads.workload import Workload

PEAK = "peak_memory_bytes"


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One implementation over the lengths of one panel."""

    panel: Panel
    implementation: str
    points: tuple[tuple[int, float], ...]
    fit: Fit | None
    limit_bytes: float = 0.0  # 0: no limit

    @property
    def reach(self) -> float | None:
        """The length that reaches the limit."""
        return None if self.fit is None else self.fit.reach(self.limit_bytes)

    @property
    def exponent(self) -> float | None:
        """The exponent where the limit is reached, or else at the longest length."""
        if self.fit is None:
            return None
        return self.fit.exponent(self.fit.lengths[-1] if self.reach is None else self.reach)

    @property
    def workload(self) -> Workload:
        """The workload at the greatest length with a measurement."""
        longest = max(length for length, _ in self.points)
        return workload_of(next(row for row in rows(self.panel.cells) if row[self.panel.axis] == longest))


def growths(results: Results, limit_bytes: float = 0.0) -> list[Growth]:
    """Each implementation with memory beyond its inputs, panel by panel in the order of the plan.

    On the CPU the default limit is most of the memory that was free during the run.
    """
    cells = table(results)
    if PEAK not in cells:
        return []
    free_bytes = 0 if results.system_load is None else results.system_load.free_bytes
    return [
        Growth(
            panel=panel,
            implementation=arm.implementation,
            points=points,
            fit=fit(points),
            limit_bytes=limit_bytes or SHARE_OF_FREE * free_bytes * device(line[0]["device"]).is_host,
        )
        for panel in panels(cells)
        for arm, line in panel.lines.items()
        if (points := tuple((row[panel.axis], row[PEAK]) for row in line if (row[PEAK] or 0.0) > 0))
    ]
