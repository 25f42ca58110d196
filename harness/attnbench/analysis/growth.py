"""Growth of memory with length: an exponent, a curve, and the length that reaches a limit.

Memory is a count, not a sample: the same call always needs the same bytes.
"""

from dataclasses import dataclass

from attnbench.analysis.recommendation import PEAK_MEMORY
from attnbench.analysis.results import Results
from attnbench.analysis.table import GROUP_AXES
from attnbench.devices import device
from attnbench.statistics.growth import Fit, fit
from attnbench.storage.events import SHARE_OF_FREE
from attnbench.storage.records import Record
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
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in results.records:
        axes = record.workload.axes()
        groups.setdefault(tuple(axes[axis] for axis in GROUP_AXES), []).append(record)
    found = []
    for group in groups.values():
        for (axis, other, name), peaks in _lines(group).items():
            points = tuple(sorted((getattr(workload, axis), peak) for workload, peak in peaks.items()))
            workload = max(peaks, key=lambda each: (each.seq_len, each.kv_len))
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


def _lines(group: list[Record]) -> dict[tuple[str, str, str], dict[Workload, float]]:
    """Peak bytes by workload, for each length that varies, other length and implementation.

    The cells differ in length only. The length is that of the keys in decoding, else that of the queries.
    """
    is_decoding = len({record.workload.seq_len for record in group}) == 1
    is_decoding = is_decoding and len({record.workload.kv_len for record in group}) > 1
    lines: dict[tuple[str, str, str], dict[Workload, float]] = {}
    for record in group:
        workload, samples = record.workload, record.samples(PEAK_MEMORY)
        other = "" if workload.kv_len == workload.seq_len else f"S={workload.kv_len}"
        axis, other = ("kv_len", f"T={workload.seq_len}") if is_decoding else ("seq_len", other)
        if samples and samples[0].value > 0:
            lines.setdefault((axis, other, record.implementation), {})[workload] = samples[0].value
    return lines
