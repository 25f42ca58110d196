"""Compute after how many calls a faster implementation has made up for its longer first call."""

import enum
import math

import msgspec

from attnbench.storage.records import Verdict

LARGEST_EXACT = 100  # larger numbers of calls are rounded to two digits


class Payoff(enum.StrEnum):
    """Whether an implementation ever makes up for a longer first call."""

    at_once = "at_once"
    after = "after"
    never = "never"
    unknown = "unknown"


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """The number of calls after which the total time is below the baseline's, with its interval."""

    payoff: Payoff
    calls: int | None = None  # 0 if `payoff` is at_once; None if it is never or unknown
    low: int | None = None  # None unless `payoff` is after
    high: int | None = None  # None unless `payoff` is after, or if the interval has no upper end

    @property
    def words(self) -> str:
        """The number with its interval: "9,300 calls (8,100 to 11,000)", or "at once", "never" or "unknown"."""
        if self.calls is None or self.low is None:
            return str(self.payoff).replace("_", " ")
        end = "or more" if self.high is None else f"to {_rounded(self.high)}"
        return f"{_rounded(self.calls)} call{'s' * (self.calls != 1)} ({_rounded(self.low)} {end})"


def _rounded(calls: int) -> str:
    return f"{calls if calls < LARGEST_EXACT else float(f'{calls:.1e}'):,.0f}"


def break_even(  # noqa: PLR0913 - two first calls, and a verdict with its numbers
    first_s: float,
    baseline_first_s: float,
    baseline_s: float,
    *,
    ratio: float,
    low: float | None,
    high: float | None,
    verdict: Verdict,
) -> BreakEven:
    """Compute the number of calls after which the savings of later calls make up for a longer first call.

    `first_s` and `baseline_first_s` are the seconds of the two first calls. `baseline_s` is the seconds of a later call
    of the baseline. `ratio` is the time of a later call divided by `baseline_s`. Its interval is `low` to `high`, which
    are None if it is unknown. The interval of the result ignores the spread of first calls.
    """
    if verdict is Verdict.undecided or low is None or high is None:
        return BreakEven(payoff=Payoff.unknown)
    if verdict is not Verdict.faster:
        return BreakEven(payoff=Payoff.never)
    if (extra_s := first_s - baseline_first_s) <= 0:
        return BreakEven(payoff=Payoff.at_once, calls=0)

    def calls(at_ratio: float) -> int:
        return math.ceil(extra_s / (baseline_s * (1 - at_ratio)))

    end = calls(high) if high < 1 else None
    return BreakEven(payoff=Payoff.after, calls=calls(ratio), low=calls(low), high=end)
