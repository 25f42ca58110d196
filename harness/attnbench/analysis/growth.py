"""Growth of memory with length: an exponent, a curve, and the length at which a limit is reached.

For batches of equal requests, the number of requests takes the place of the length, and memory includes the cache,
which is most of a service's memory. Memory is counted, not sampled: a call always needs the same number of bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnbench.analysis.recommendation import peak_bytes
from attnbench.analysis.results import Results
from attnbench.analysis.table import GROUP_AXES, by_length
from attnbench.devices import device
from attnbench.plugins import is_dense
from attnbench.statistics.growth import FEWEST_LENGTHS, Fit, fit
from attnbench.storage.events import SHARE_OF_FREE
from attnbench.storage.records import Record
from attnbench.units import grouped, sanitize_line, show
from attnbench.workloads.counts import gathered_bytes, pool_bytes
from attnbench.workloads.workload import Workload

REQUESTS = "requests"
"""Name of the axis for growth with the number of equal requests."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The memory of one implementation as a function of one length or the number of requests, with all else equal."""

    axis: str  # seq_len, kv_len or REQUESTS
    other: str  # the other length ("T=1"); "" if the lengths are equal; for REQUESTS, "requests of 4,096 keys"
    implementation: str
    workload: Workload  # the one with the greatest measured length
    points: tuple[tuple[int, float], ...]  # (length, peak bytes), sorted by length; with requests, cache included
    fit: Fit | None
    limit_bytes: float = 0.0  # 0: no limit

    @property
    def reach(self) -> float | None:
        """The length (or number of requests) at which the curve reaches the limit; None if it never does.

        Also None without a curve or a limit, or if the constant part of the memory exceeds the limit.
        """
        return None if self.fit is None else self.fit.reach(self.limit_bytes)

    @property
    def exponent(self) -> float | None:
        """The exponent where the curve reaches the limit, or else at the longest length; None without a curve."""
        if self.fit is None:
            return None
        return self.fit.exponent(self.fit.lengths[-1] if self.reach is None else self.reach)

    @property
    def sentence(self) -> str:
        """One line: the growth, and the length or number of requests that the limit allows; or why no curve exists."""
        fit, letter = self.fit, "T" if self.axis == "seq_len" else "S"
        name, limit = sanitize_line(self.implementation), show(self.limit_bytes, "bytes")
        if fit is None:
            few, what = len(self.points) < FEWEST_LENGTHS, "batches" if self.axis == REQUESTS else "lengths"
            why = f"growth needs three {what} or more" if few else "its memory fits no curve"
            return f"{name}: {why}; {what} measured: {len(self.points)}"
        if self.axis == REQUESTS:
            more = f"one more needs {show(fit.slope(fit.lengths[-1]), 'bytes')} for cache and call"
            text = f"{more}, fitted over {fit.lengths[0]:,} to {fit.lengths[-1]:,}"
            if self.limit_bytes <= 0:
                return f"{name}: {text}"
            return f"{name}: {limit} holds {rounded_down(self.reach or 0.0):,} of them; {text}"
        fitted = f"fitted over {letter}={fit.lengths[0]} to {fit.lengths[-1]}"
        text = f"memory grows with {letter}^{self.exponent:.2f}"
        if self.limit_bytes <= 0:
            return f"{name}: {text}, {fitted}"
        if self.reach is None:
            return f"{name}: the fitted curve does not reach {limit}; {text}, {fitted}"
        length = round(self.reach, min(0, 4 - len(str(int(self.reach)))))
        return f"{name}: {limit} is reached at {letter}={length:.0f}; there {text}, {fitted}"

    def facts(self) -> dict[str, Any]:
        """Return the growth as JSON fields: lengths in tokens, memory in bytes, and a, b and c of the curve (`Fit`).

        On the axis REQUESTS, the lengths are numbers of requests, and the peaks include the cache.
        """
        return {
            "workload": self.workload.id,
            "direction": self.workload.direction,
            "axis": self.axis,
            "others": self.other,
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
    """Compute the growth of each implementation that needs memory beyond its inputs, for each group of workloads.

    If `limit_bytes` is 0, the limit on the CPU is SHARE_OF_FREE of the least memory that was free when a process of the
    run started, and other devices have no limit.
    """
    free_bytes = 0 if results.system_load is None else results.system_load.free_bytes
    found = []
    for axis, other, members in _series(results.records):
        measured = [record for record in members if peak_bytes(record)]
        for name, alike in grouped(measured, lambda record: record.implementation).items():
            workload = max((record.workload for record in alike), key=lambda each: (each.seq_len, each.kv_len))
            points = tuple(sorted(_point(axis, record, results) for record in alike))
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


def _series(records: tuple[Record, ...]) -> Iterator[tuple[str, str, list[Record]]]:
    """Yield series of records that differ only in a length, or in the number of equal requests.

    Each series is a tuple: its axis, the other length (or a description of the requests), and its records.
    """
    alike = grouped(records, lambda record: _request(record.workload))
    for group in grouped(alike.pop("", []), lambda record: _axes(record.workload)).values():
        for (axis, other), members in by_length(group, lambda record: record.workload).items():
            yield axis, other, members
    for request, same in alike.items():
        for members in grouped(same, lambda record: _axes(record.workload, "batch")).values():
            yield REQUESTS, request, members


def _axes(workload: Workload, *but: str) -> tuple[object, ...]:
    """Return the values of all axes except the lengths and the axes in `but`."""
    axes = workload.axes()
    return tuple(axes[axis] for axis in GROUP_AXES if axis not in but)


def rounded_down(number: float) -> int:
    """Round down to an integer with at most four significant digits, since an extrapolation is no more accurate."""
    text = str(int(number))
    return int(text[:4] + "0" * (len(text) - 4))


def _request(workload: Workload) -> str:
    """Describe the requests of a batch in which all are equal: "requests of 4,096 keys"; "" for any other workload."""
    if len({*workload.requests}) != 1:
        return ""
    new, total = workload.requests[0]
    return f"requests of {'' if new == 1 else f'{new:,} new tokens and '}{total:,} keys"


def _point(axis: str, record: Record, results: Results) -> tuple[int, float]:
    """Return the length (or the number of requests) and the peak bytes of a record.

    The bytes for requests include their cache. If the implementation reads no pages, they also include the copy of the
    keys and values, in the dtype of the call, that is gathered for it.
    """
    peak, workload = peak_bytes(record) or 0.0, record.workload
    if axis != REQUESTS:
        return getattr(workload, axis), peak
    copied = gathered_bytes(workload) if is_dense(results.plan.specs[record.arm]) else 0
    return len(workload.requests), peak + pool_bytes(workload) + copied
