"""How memory grows with length: an exponent with its interval, a curve, and the length at which a limit is reached.

Memory is a count, not a sample: the same call takes the same bytes. What is not known is how it goes on, so that all
intervals here come from how well a simple law fits the lengths that were measured. `Asking` checks a prediction by
calls of a worker, one near either side of the limit, none that lasts too long.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from attnbench.analysis.results import Results
from attnbench.analysis.table import Panel, panels, rows, table, workload_of
from attnbench.processes.messages import Attempt, Attempted, Failed
from attnbench.processes.worker_client import WorkerClient
from attnbench.statistics.intervals import growth_exponent
from attnbench.statistics.verdict import half_widths
from attnbench.storage.memory_events import SHARE_OF_FREE, SLACK_BYTES
from attnbench.storage.records import Arm, Status
from attnbench.units import duration
from attnbench.workloads.workload import Workload

PEAK = "peak_memory_bytes"
FEWEST_LENGTHS = 3
FEWEST_FITTED = 4
"""The longer half of the lengths is fitted, so many at least where there are: constant parts, and kernels that work
otherwise on short inputs, bend the line there."""
EXACT = 1e-9
"""A relative misfit of less is none."""

Parts = tuple[float, float, float]
"""Of a curve: a constant, bytes for each token, bytes for each pair of tokens."""
MARGIN = 0.05
"""Calls are tried so far below and above the limit; further where the limit is not much larger than the slack."""
CLOSE = 0.05
"""A peak is as predicted where it is no further from it, relatively."""
GRAIN, FINE_GRAIN = 64, 8
"""Lengths that are tried are multiples of it; of the finer one below the first number of grains."""
FEW_GRAINS = 32
SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""Of the worker: large blocks come from the system and go back to it, so that the limit is on what is in use
(mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html)."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """A length, and the lengths between which it lies as far as the fit can show."""

    point: float
    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        """Whether the fit is exact to less than one token."""
        return self.high - self.low < 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Growth over `lengths`, which are those that were fitted.

    `exponent` is the slope of log(bytes) over log(length): 1 is linear, 2 quadratic; `low` and `high` bound it at 95 %.
    `end` is the slope between the last two lengths. `parts` is the curve; `others` are those with a length left out.
    """

    lengths: tuple[int, ...]
    values: tuple[float, ...]
    exponent: float
    low: float
    high: float
    end: float
    parts: Parts
    others: tuple[Parts, ...]

    @property
    def misfit(self) -> float:
        """The largest relative distance of the curve from what was measured."""
        return max(abs(self.predict(x) / y - 1) for x, y in zip(self.lengths, self.values, strict=True))

    def predict(self, length: float) -> float:
        """Bytes at a length."""
        a, b, c = self.parts
        return a + b * length + c * length**2

    def slope(self, length: float) -> float:
        """The exponent of the curve at a length."""
        _, b, c = self.parts
        return (b * length + 2 * c * length**2) / self.predict(length)

    def reach(self, limit: float) -> Reach | None:
        """Where `limit` bytes are reached; None where they never are."""
        off = self.misfit if self.misfit > EXACT else 0.0
        ends = [
            solve(parts, limit * factor) for parts in (self.parts, *self.others) for factor in (1 / (1 + off), 1 + off)
        ]
        known, point = [length for length in ends if length is not None], solve(self.parts, limit)
        return None if point is None else Reach(point=point, low=min(known), high=max(known))


def fit(points: Iterable[tuple[int, float]]) -> Fit | None:
    """The growth over (length, bytes); None with fewer than three lengths, or where nothing is taken.

    The exponent is the least-squares slope on log scales, its interval Student's t over the distances from the line.
    """
    every = sorted((length, value) for length, value in points if length > 0 and value > 0)
    if len({length for length, _ in every}) < FEWEST_LENGTHS:
        return None
    used = every[-max(FEWEST_FITTED, math.ceil(len(every) / 2)) :]
    lengths, values = tuple(x for x, _ in used), tuple(y for _, y in used)
    from scipy.stats import linregress  # here, because it takes longer to import than --help may take

    line = linregress(np.log(lengths), np.log(values))
    exponent, half = float(line.slope), float(half_widths(float(line.stderr), len(lengths) - 2, 0.05))
    end = growth_exponent(lengths[-2:], values[-2:])
    assert end is not None
    left_out = [used[:place] + used[place + 1 :] for place in range(len(used))] if len(used) > FEWEST_LENGTHS else []
    return Fit(
        lengths=lengths,
        values=values,
        exponent=exponent,
        low=exponent - half,
        high=exponent + half,
        end=end,
        parts=curve(used),
        others=tuple(curve(rest) for rest in left_out),
    )


def curve(points: Sequence[tuple[int, float]]) -> Parts:
    """The parts of a + b T + c T^2, none of them below 0, by least squares of relative distances.

    Attention holds tensors of three kinds: of no length, of one, and of two; none takes memory away. Source: C. L.
    Lawson and R. J. Hanson, Solving Least Squares Problems, 1974, chapter 23 (non-negative least squares).
    """
    from scipy.optimize import nnls  # here, because it takes longer to import than --help may take

    x, y = np.array(points, dtype=np.float64).T
    powers = np.vander(x / x[-1], 3, increasing=True) / y[:, None]
    found, _ = nnls(powers * y[-1], np.ones(len(x)))
    found[found < EXACT] = 0.0  # of the longest length's bytes: what rounding leaves must not grow into a limit
    a, b, c = (float(part * y[-1] / x[-1] ** power) for power, part in enumerate(found))
    return a, b, c


def solve(parts: Parts, limit: float) -> float | None:
    """The length at which a curve reaches `limit`; None where it does not, or starts above it."""
    a, b, c = parts
    room = limit - a
    if room <= 0 or (b <= 0 and c <= 0):
        return None
    return 2 * room / (b + math.sqrt(b**2 + 4 * c * room))  # the root that is not a difference of like numbers


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
        longest = workload_of(rows(self.panel.cells.nlargest(1, self.panel.axis))[0])
        if self.panel.axis == "seq_len":
            return longest.at_length(max(1, round(length * longest.longest / longest.seq_len)))
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
    cells = table(results)
    if PEAK not in cells:
        return []
    return [
        Growth(panel=panel, implementation=arm.implementation, points=points, fit=fit(points), limit_bytes=limit_bytes)
        for panel in panels(cells)
        for arm, line in panel.lines.items()
        if (points := tuple((row[panel.axis], row[PEAK]) for row in line if (row[PEAK] or 0.0) > 0))
    ]


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Asks for calls; `specs` say where each implementation comes from, `say` receives what is under way."""

    client: WorkerClient
    specs: dict[Arm, str]
    call_limit_s: float
    say: Callable[[str], object]

    def limited(self, growth: Growth, *, tries: bool) -> Growth:
        """The same with a limit, most of what is free where it had none, and the outcomes of calls near the limit."""
        if growth.fit is None or (growth.limit_bytes and not tries):
            return growth
        longest = growth.fit.lengths[-1]
        base = self._ask(growth, longest)
        if isinstance(base, Attempted) and not growth.limit_bytes:
            growth = replace(growth, limit_bytes=SHARE_OF_FREE * base.free_bytes)
        outcomes = [self._try(growth, outcome, base, longest) for outcome in growth.tries()] if tries else []
        return replace(growth, outcomes=tuple(outcomes))

    def _try(self, growth: Growth, outcome: Outcome, base: Attempted | Failed, longest: int) -> Outcome:
        """A call, unless it is predicted to last too long: twice the length is four times the work, at the most."""
        if isinstance(base, Failed):
            text = f"not even {growth.panel.letter}={longest} could be called again: {base.message}"
            return msgspec.structs.replace(outcome, message=text)
        call_s = base.call_s * (outcome.length / longest) ** 2
        if call_s > self.call_limit_s:
            text = f"one call is predicted to last {duration(call_s)}, over the limit of {duration(self.call_limit_s)}"
            return msgspec.structs.replace(outcome, message=text)
        found = self._ask(growth, outcome.length, limit_bytes=int(growth.limit_bytes))
        if isinstance(found, Attempted):
            return msgspec.structs.replace(outcome, status=Status.ok, measured_bytes=float(found.peak_bytes))
        status = None if found.status is Status.unsupported else found.status
        return msgspec.structs.replace(outcome, status=status, message=found.message)

    def _ask(self, growth: Growth, length: int, *, limit_bytes: int = 0) -> Attempted | Failed:
        self.say(f"{growth.implementation}: one call at {growth.panel.axis} {length}")
        arm, workload = Arm(implementation=growth.implementation), growth.workload(length)
        if not self.client.is_running:
            self.client.start()
        reply = self.client.ask(Attempt(workload=workload, arm=arm, spec=self.specs[arm], limit_bytes=limit_bytes))
        assert isinstance(reply, Attempted | Failed)
        return reply
