"""Our side of a comparison: the engine on two calls, watched continuously."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from attnbench.devices.cpu import CpuClock
from attnbench.statistics.interference import MANY
from attnbench.statistics.verdict import Judgement
from attnbench.storage.records import FALSE_SHARE, Arm, Verdict
from attnbench.timing.functions import FunctionComparison
from attnbench.timing.schedule import load_libraries
from attnbench.workloads.sweep import SMALLEST_EFFECT
from studies.acceptance.outcome import Row

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

    judgement: Judgement
    num_pairs: int
    verdict: Verdict
    decided_s: float  # when the verdict was settled; infinity: never
    discarded_share: float
    wall_s: float

    @property
    def log(self) -> float:
        """The logarithm of the ratio."""
        return self.judgement.effect.log

    @property
    def is_alarm(self) -> bool:
        """Whether one is called faster or slower."""
        return self.verdict in {Verdict.faster, Verdict.slower}

    @property
    def is_invalid(self) -> bool:
        """Whether the session says of itself that it was disturbed too much."""
        return self.discarded_share > MANY

    def row(self) -> Row:
        """For the tables."""
        return {
            "log": self.log,
            "half_width": self.judgement.half_width or math.inf,
            "standard_error": self.judgement.effect.error or math.inf,
            "num_pairs": float(self.num_pairs),
            "is_alarm": float(self.is_alarm),
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
    return Ours(
        judgement=found.judgements[name],
        num_pairs=len(found.samples[Arm(implementation=name)]),
        verdict=found.judgements[name].verdict,
        decided_s=found.settled_s.get(name, math.inf),
        discarded_share=found.gauge.num_discarded / max(1, found.gauge.num_blocks),
        wall_s=time.perf_counter() - start,
    )
