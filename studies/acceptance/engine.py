"""Our side of a comparison: the engine on two calls, watched continuously."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnbench.devices.cpu import CpuClock
from attnbench.statistics.evidence import e_values
from attnbench.statistics.interference import MANY
from attnbench.statistics.intervals import Estimate, pairs
from attnbench.storage.records import FALSE_SHARE, Arm, Verdict
from attnbench.timing.functions import FunctionComparison
from attnbench.timing.schedule import load_libraries
from attnbench.workloads.sweep import SMALLEST_EFFECT
from studies.acceptance.outcome import Row
from studies.acceptance.plan import LARGEST_E

OURS = "attnbench"
ARMS = 3  # A, its copy, B
BLOCKS = 4  # of a visit
SHORTEST_SAMPLE_S = 1.5e-3


class SlowedClock(CpuClock):
    """The processor's timer, which finds one of the calls `factor` times as slow as it is: a known truth."""

    def __init__(self, slow: Callable[[], object], factor: float) -> None:
        """Slow down that call alone."""
        super().__init__()
        self._slow, self._factor = slow, factor

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Wall time of the calls, times the factor for the slowed one."""
        spent_s = super().elapsed(call, num_calls)
        return spent_s * self._factor if call is self._slow else spent_s


@dataclass(frozen=True, kw_only=True)
class Ours:
    """What the engine found for B against A."""

    ratio: Estimate
    largest_e: float  # that was ever reached
    found_s: float  # when the e-value first reached 20 while B seemed slower; infinity: never
    verdict: Verdict
    decided_s: float  # when the verdict was settled; infinity: never
    discarded_share: float
    wall_s: float

    @property
    def log(self) -> float:
        """The logarithm of the ratio."""
        return math.log(self.ratio.point)

    @property
    def is_invalid(self) -> bool:
        """Whether the session says of itself that it was disturbed too much."""
        return self.discarded_share > MANY

    def row(self) -> Row:
        """For the tables."""
        return {
            "log": self.log,
            "half_width": self.ratio.half_width or math.inf,
            "standard_error": self.ratio.standard_error or math.inf,
            "num_pairs": float(self.ratio.num_samples),
            "largest_e": self.largest_e,
            "found_s": self.found_s,
            "verdict": str(self.verdict),
            "decided_s": self.decided_s,
            "discarded_share": self.discarded_share,
            "wall_s": self.wall_s,
        }


def compare(  # noqa: PLR0913 - all but the first three have defaults
    a: Callable[[], object],
    b: Callable[[], object],
    budget_s: float,
    *,
    stops: bool = False,
    clock: CpuClock | None = None,
    seed: int = 0,
    smallest_effect: float = SMALLEST_EFFECT,
    false_share: float = FALSE_SHARE,
) -> Ours:
    """B against A within the budget, calibration, control and probe included; no visit begins that would exceed it."""
    clock = clock or CpuClock()
    load_libraries()
    visit_s = ARMS * BLOCKS * max(SHORTEST_SAMPLE_S, min(clock.elapsed(a, 1) for _ in range(2)))
    start = time.perf_counter()
    found = FunctionComparison(
        {"a": a, "b": b}, "a", clock=clock, seed=seed, smallest_effect=smallest_effect, false_share=false_share
    )
    found.run(budget_s - visit_s, stops=stops)
    return read(found, "b", start)


def read(found: FunctionComparison, name: str, start: float) -> Ours:
    """What a comparison that began at `start` says of one of its arms."""
    own, reference = found.samples[Arm(implementation=name)], found.samples[found.reference]
    compared = pairs(own, reference, found.discarded, found.samples[found.control])
    values = e_values(compared.logs, compared.controls)
    reached = np.flatnonzero((values >= LARGEST_E) & (np.cumsum(compared.halfway) > 0))
    ends: dict[tuple[int, int], float] = {}
    for taken in found.samples.values():
        for sample in taken:
            at, end = (sample.epoch, sample.visit), sample.start_s + sample.value * sample.num_calls
            ends[at] = max(end, ends.get(at, end))
    return Ours(
        ratio=found.judgements[name].effect.ratio,
        largest_e=float(np.max(values, initial=1.0)),
        found_s=ends[compared.visits[reached[0]]] - start if len(reached) else math.inf,
        verdict=found.judgements[name].verdict,
        decided_s=found.settled_s.get(name, math.inf),
        discarded_share=found.gauge.num_discarded / max(1, found.gauge.num_blocks),
        wall_s=time.perf_counter() - start,
    )
