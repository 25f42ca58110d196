"""Growth of memory with length: an exponent, a curve, and the length that reaches a limit.

Memory is a count, not a sample: the same call always needs the same bytes.
"""

from dataclasses import dataclass
from typing import Any

from attnbench.analysis.recommendation import peak_bytes
from attnbench.analysis.results import Results
from attnbench.analysis.table import GROUP_AXES, by_length
from attnbench.devices import device
from attnbench.statistics.growth import FEWEST_LENGTHS, Fit, fit
from attnbench.storage.events import SHARE_OF_FREE
from attnbench.units import grouped, sanitize_line, show
from attnbench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The memory of one implementation as a function of one length, with all other axes equal."""

    axis: str  # seq_len or kv_len
    other: str  # the other length if it differs: "T=1"; else ""
    implementation: str
    workload: Workload  # the one with the greatest measured length
    points: tuple[tuple[int, float], ...]  # (length, peak bytes), sorted by length
    fit: Fit | None
    limit_bytes: float = 0.0  # 0: no limit

    @property
    def reach(self) -> float | None:
        """The length at which the curve reaches the limit; None without a curve or a limit, or if it is never reached.

        Also None if even the memory that does not grow exceeds the limit.
        """
        return None if self.fit is None else self.fit.reach(self.limit_bytes)

    @property
    def exponent(self) -> float | None:
        """The exponent where the limit is reached, or else at the longest length; None without a curve."""
        if self.fit is None:
            return None
        return self.fit.exponent(self.fit.lengths[-1] if self.reach is None else self.reach)

    @property
    def sentence(self) -> str:
        """One line with the exponent, and the length at which the limit is reached."""
        fit, letter = self.fit, "T" if self.axis == "seq_len" else "S"
        name, limit = sanitize_line(self.implementation), show(self.limit_bytes, "bytes")
        if fit is None:
            few = len(self.points) < FEWEST_LENGTHS
            why = "growth needs three lengths or more" if few else "its memory fits no curve"
            return f"{name}: {why}; lengths measured: {len(self.points)}"
        fitted = f"fitted over {letter}={fit.lengths[0]} to {fit.lengths[-1]}"
        text = f"memory grows with {letter}^{self.exponent:.2f}"
        if self.limit_bytes <= 0:
            return f"{name}: {text}, {fitted}"
        if self.reach is None:
            return f"{name}: the fitted curve does not reach {limit}; {text}, {fitted}"
        length = round(self.reach, min(0, 4 - len(str(int(self.reach)))))
        return f"{name}: {limit} is reached at {letter}={length:.0f}; there {text}, {fitted}"

    def facts(self) -> dict[str, Any]:
        """The growth as fields of JSON: lengths in tokens, memory in bytes, and the curve's a, b and c as in Fit."""
        return {
            "workload": self.workload.id,
            "direction": self.workload.direction,
            "axis": self.axis,
            "implementation": self.implementation,
            "lengths": [length for length, _ in self.points],
            "peak_bytes": [value for _, value in self.points],
            "fitted_lengths": self.fit and list(self.fit.lengths),
            "exponent": self.exponent,
            "curve_bytes": self.fit and list(self.fit.parts),
            "limit_bytes": self.limit_bytes or None,
            "reached_at": self.reach,
        }


def growths(results: Results, limit_bytes: float = 0.0) -> list[Growth]:
    """The growth of each implementation that needs memory beyond its inputs, for each group of workloads.

    If `limit_bytes` is 0, the limit on the CPU is 75 % of the least memory that was free when a process of the run
    started; other devices have none.
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
