"""Growth of memory with length: an exponent, a curve, and the length that reaches a limit.

Memory is a count, not a sample: the same call always needs the same bytes.
"""

from dataclasses import dataclass

from attnbench.analysis.recommendation import peak_bytes
from attnbench.analysis.results import Results
from attnbench.analysis.table import GROUP_AXES, by_length
from attnbench.devices import device
from attnbench.statistics.growth import Fit, fit
from attnbench.storage.events import SHARE_OF_FREE
from attnbench.units import grouped
from attnbench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One implementation over one length, the other axes being equal."""

    axis: str  # seq_len or kv_len
    other: str  # the other length if it differs: "T=1"
    implementation: str
    workload: Workload  # at the greatest length with a measurement
    points: tuple[tuple[int, float], ...]  # lengths and bytes, sorted
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


def growths(results: Results, limit_bytes: float = 0.0) -> list[Growth]:
    """Each implementation with memory beyond its inputs, group by group in the order of the plan.

    On the CPU the default limit is most of the memory that was free during the run.
    """
    free_bytes = 0 if results.system_load is None else results.system_load.free_bytes
    groups = grouped(results.records, lambda record: tuple(map(record.workload.axes().get, GROUP_AXES)))
    found = []
    for group in groups.values():
        for (axis, other), members in by_length(group, lambda record: record.workload).items():
            measured = [record for record in members if peak_bytes(record)]
            for name, alike in grouped(measured, lambda record: record.implementation).items():
                workload = max((record.workload for record in alike), key=lambda each: (each.seq_len, each.kv_len))
                points = tuple(sorted((getattr(one.workload, axis), peak_bytes(one) or 0.0) for one in alike))
                limit = limit_bytes or SHARE_OF_FREE * free_bytes * device(workload.device).is_host
                found.append(
                    Growth(
                        axis=axis,
                        other=other,
                        implementation=name,
                        workload=workload,
                        points=points,
                        fit=fit(points),
                        limit_bytes=limit,
                    )
                )
    return found
