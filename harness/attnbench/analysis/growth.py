"""Growth of memory with length: an exponent with its interval, a curve, and the length that reaches a limit.

Memory is a count, not a sample: the same call always needs the same bytes. Only the extrapolation is uncertain, so all
intervals come from the misfit of a simple law at the measured lengths. `Asking` verifies a prediction with real calls
close to the limit, one on either side, none of them too long.
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
"""The longer half of the lengths is fitted, and at least this many if possible: constant parts, and kernels that behave
differently on short inputs, bend the line at short lengths."""
EXACT = 1e-9
"""A smaller relative misfit counts as zero."""

Parts = tuple[float, float, float]
"""Coefficients of a curve: a constant, bytes for each token, bytes for each pair of tokens."""
MARGIN = 0.05
"""Relative distance of the trial calls from the limit; larger if the slack is large relative to the limit."""
CLOSE = 0.05
"""A measured peak confirms the prediction within this relative distance."""
GRAIN, FINE_GRAIN = 64, 8
"""Trial lengths are multiples of GRAIN; short ones, below FEW_GRAINS grains, are multiples of FINE_GRAIN."""
FEW_GRAINS = 32
SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""Environment variables of the worker: large blocks come from the system and return to it, so that the limit applies to
memory in use (mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html)."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """A length with its bounds, as precise as the fit allows."""

    point: float
    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        """Whether the fit is exact to less than one token."""
        return self.high - self.low < 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Growth over `lengths`, the fitted ones.

    `exponent` is the slope of log(bytes) over log(length): 1 is linear, 2 quadratic; `low` and `high` bound it at 95 %.
    `end` is the slope between the last two lengths. `parts` is the curve; `others` are the curves with one length left
    out.
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
        """The largest relative distance between the curve and a measurement."""
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
        """The length that needs `limit` bytes; None if no length does."""
        off = self.misfit if self.misfit > EXACT else 0.0
        ends = [
            solve(parts, limit * factor) for parts in (self.parts, *self.others) for factor in (1 / (1 + off), 1 + off)
        ]
        known, point = [length for length in ends if length is not None], solve(self.parts, limit)
        return None if point is None else Reach(point=point, low=min(known), high=max(known))


def fit(points: Iterable[tuple[int, float]]) -> Fit | None:
    """Fit the growth over (length, bytes); None with fewer than three lengths, or if no memory is used.

    The exponent is the least-squares slope on log scales, its interval Student's t over the residuals.
    """
    every = sorted((length, value) for length, value in points if length > 0 and value > 0)
    if len({length for length, _ in every}) < FEWEST_LENGTHS:
        return None
    used = every[-max(FEWEST_FITTED, math.ceil(len(every) / 2)) :]
    lengths, values = tuple(x for x, _ in used), tuple(y for _, y in used)
    from scipy.stats import linregress  # here, because it imports too slowly for --help

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
    """Fit a + b T + c T^2 with nonnegative coefficients by least squares of relative residuals.

    Attention holds tensors that are constant, linear or quadratic in the length. Source: C. L. Lawson and R. J. Hanson,
    Solving Least Squares Problems, 1974, chapter 23 (non-negative least squares).
    """
    from scipy.optimize import nnls  # here, because it imports too slowly for --help

    x, y = np.array(points, dtype=np.float64).T
    powers = np.vander(x / x[-1], 3, increasing=True) / y[:, None]
    found, _ = nnls(powers * y[-1], np.ones(len(x)))
    found[found < EXACT] = 0.0  # rounding residue must not reach a limit
    a, b, c = (float(part * y[-1] / x[-1] ** power) for power, part in enumerate(found))
    return a, b, c


def solve(parts: Parts, limit: float) -> float | None:
    """The length at which a curve reaches `limit`; None if it never does, or starts above it."""
    a, b, c = parts
    room = limit - a
    if room <= 0 or (b <= 0 and c <= 0):
        return None
    return 2 * room / (b + math.sqrt(b**2 + 4 * c * room))  # this form of the root avoids cancellation


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One call near the limit: the prediction, and the result."""

    length: int
    predicted_bytes: float
    fits: bool  # as predicted
    status: Status | None = None  # None: not tried
    measured_bytes: float | None = None
    message: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the call refutes the prediction."""
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
        """The length that reaches the limit."""
        return None if self.fit is None else self.fit.reach(self.limit_bytes)

    @property
    def is_wrong(self) -> bool:
        """Whether any call refutes the prediction."""
        return any(outcome.is_wrong for outcome in self.outcomes)

    def workload(self, length: int) -> Workload:
        """The panel's workload at a length, with its mask adjusted."""
        longest = workload_of(rows(self.panel.cells.nlargest(1, self.panel.axis))[0])
        if self.panel.axis == "seq_len":
            return longest.at_length(max(1, round(length * longest.longest / longest.seq_len)))
        mask = str(longest.mask_rule.at_other_length())
        return msgspec.structs.replace(longest, kv_len=length, mask=mask)

    def tries(self) -> list[Outcome]:
        """Plan two trial calls: a length that should just fit, and one that should not."""
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
    """Round to a length that suits kernels."""
    grain = GRAIN if length >= FEW_GRAINS * GRAIN else FINE_GRAIN
    return how(length / grain) * grain


def growths(results: Results, limit_bytes: float = 0.0) -> list[Growth]:
    """Each implementation with memory beyond its inputs, panel by panel in the order of the plan."""
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
    """Runs trial calls in a worker; `specs` is the source of each implementation, `say` receives progress messages."""

    client: WorkerClient
    specs: dict[Arm, str]
    call_limit_s: float
    say: Callable[[str], object]

    def limited(self, growth: Growth, *, tries: bool) -> Growth:
        """Add a limit (default: most of the free memory) and the outcomes of calls near it."""
        if growth.fit is None or (growth.limit_bytes and not tries):
            return growth
        longest = growth.fit.lengths[-1]
        base = self._ask(growth, longest)
        if isinstance(base, Attempted) and not growth.limit_bytes:
            growth = replace(growth, limit_bytes=SHARE_OF_FREE * base.free_bytes)
        outcomes = [self._try(growth, outcome, base, longest) for outcome in growth.tries()] if tries else []
        return replace(growth, outcomes=tuple(outcomes))

    def _try(self, growth: Growth, outcome: Outcome, base: Attempted | Failed, longest: int) -> Outcome:
        """Try a call, unless it is predicted to last too long: twice the length is at most four times the work."""
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
