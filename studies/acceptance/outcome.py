"""The outcome of an acceptance test, and confidence limits of a share."""

import msgspec

from studies.frame import Row

CONFIDENCE = 0.95


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One test's result. Its limit was fixed before the test ran, and a miss is printed as a miss."""

    id: str
    title: str
    limit: str
    found: str
    passes: bool
    rows: tuple[Row, ...] = ()

    def __str__(self) -> str:
        """Format the outcome in one line."""
        return f"{self.id}: {self.title}: {self.found} (limit: {self.limit}): {self.word}"

    @property
    def word(self) -> str:
        """The result as a word: pass or MISS."""
        return "pass" if self.passes else "MISS"


def upper_limit(hits: int, number: int, confidence: float = 0.99) -> float:
    """Return the upper end of the one-sided confidence interval of a share, given `hits` among `number`.

    Source: Clopper and Pearson, 1934, https://doi.org/10.1093/biomet/26.4.404.
    """
    from scipy.special import betaincinv  # here, because it imports slowly

    return 1.0 if hits >= number else float(betaincinv(hits + 1, number - hits, confidence))


def at_most(hits: int, number: int) -> str:
    """Format the share of `hits` in `number`, with the upper end of its one-sided 95 % interval."""
    return f"{hits} of {number} (at most {upper_limit(hits, number, CONFIDENCE):.0%})"


def at_least(hits: int, number: int) -> str:
    """Format the share of `hits` in `number`, with the lower end of its one-sided 95 % interval."""
    return f"{hits} of {number} (at least {1 - upper_limit(number - hits, number, CONFIDENCE):.0%})"
