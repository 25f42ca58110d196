"""The growth of each implementation in a run, panel by panel, and what became of the calls that checked it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from attnbench.analysis.growth.fit import Fit, Reach, fit
from attnbench.analysis.results import Results
from attnbench.reports.panels import Panel, panels_of, titled
from attnbench.reports.table import shown
from attnbench.storage.memory_events import SLACK_BYTES
from attnbench.storage.records import Status
from attnbench.timing.prediction import at_length
from attnbench.workloads.workload import Workload

MARGIN = 0.05
"""Calls are tried so far below and above the limit; further where the limit is not much larger than the slack."""
CLOSE = 0.05
"""A peak is as predicted where it is no further from it, relatively."""
GRAIN, FINE_GRAIN = 64, 8
"""Lengths that are tried are multiples of it; of the finer one below the first number of grains."""
FEW_GRAINS = 32


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One call near the limit: what was predicted, and what became of it."""

    length: int
    predicted_bytes: float
    fits: bool  # as predicted
    status: Status | None = None  # None: not tried
    measured_bytes: float | None = None
    message: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the prediction was."""
        if self.status is None:
            return False
        if self.fits and self.measured_bytes is not None:
            return abs(self.measured_bytes / self.predicted_bytes - 1) > CLOSE
        return self.status is not (Status.ok if self.fits else Status.out_of_memory)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One implementation over the lengths of one panel. `fit` is None below three lengths."""

    panel: Panel
    implementation: str
    points: tuple[tuple[int, float], ...]
    fit: Fit | None
    limit_bytes: float = 0.0
    outcomes: tuple[Outcome, ...] = ()

    @property
    def reach(self) -> Reach | None:
        """Where the limit is reached."""
        return None if self.fit is None else self.fit.reach(self.limit_bytes)

    @property
    def is_wrong(self) -> bool:
        """Whether any call refuted the prediction."""
        return any(outcome.is_wrong for outcome in self.outcomes)

    def workload(self, length: int) -> Workload:
        """The panel's workload at a length, its mask made to fit."""
        longest = max((row.workload for row in self.panel.rows), key=self.panel.length)
        if self.panel.axis == "seq_len":
            return at_length(longest, length)
        mask = str(longest.mask_rule.at_other_length())
        return msgspec.structs.replace(longest, kv_len=length, mask=mask)

    def tries(self) -> list[Outcome]:
        """What to try: a length that should just fit, and one that should not."""
        if self.fit is None or self.reach is None:
            return []
        margin = max(MARGIN, 2 * SLACK_BYTES / self.limit_bytes)
        below, above = self.fit.reach(self.limit_bytes * (1 - margin)), self.fit.reach(self.limit_bytes * (1 + margin))
        lengths = {}
        if below is not None and (length := rounded(below.low, math.floor)) > 0:
            lengths[length] = True
        if above is not None:
            lengths[rounded(above.high, math.ceil)] = False
        return [
            Outcome(length=length, predicted_bytes=self.fit.predict(length), fits=fits)
            for length, fits in lengths.items()
        ]


def rounded(length: float, how: Callable[[float], int]) -> int:
    """A length that kernels like."""
    grain = GRAIN if length >= FEW_GRAINS * GRAIN else FINE_GRAIN
    return how(length / grain) * grain


def growths(results: Results, limit_bytes: float = 0.0) -> list[Growth]:
    """Each implementation with a peak above its inputs, panel by panel in the order of the plan."""
    return [
        Growth(panel=panel, implementation=name, points=points, fit=fit(points), limit_bytes=limit_bytes)
        for panel in titled(panels_of(shown(results)))
        for name, points in _points(panel)
    ]


def _points(panel: Panel) -> Iterator[tuple[str, tuple[tuple[int, float], ...]]]:
    for name in dict.fromkeys(row.implementation for row in panel.rows):
        found = {
            panel.length(row.workload): row.peak_memory_bytes
            for row in panel.rows
            if row.implementation == name and row.peak_memory_bytes
        }
        if found:
            yield name, tuple(sorted(found.items()))
