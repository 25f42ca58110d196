"""Attention looked at instead of measured: one small workload over the words of a sentence, step by step.

`walkthrough` and `oracle_diff` compute, `text` and `page` show what they computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from attnbench import plugins
from attnbench.inspection import oracle_diff, walkthrough
from attnbench.inspection.oracle_diff import OracleDiff
from attnbench.inspection.walkthrough import Json, Numbers, Walkthrough, listed

MOST_JOINED_WORDS = 48


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All results: for each sentence a walkthrough, and the implementation compared with the oracle."""

    spec: str  # as it was given
    implementation: str
    diffs: tuple[OracleDiff, ...]
    joined: Walkthrough | None  # the sentences in one row without a mask, where there are several
    growth: tuple[Numbers, Numbers]  # the largest weight against K, with the division by sqrt(K) and without

    @property
    def walks(self) -> tuple[Walkthrough, ...]:
        """The walkthrough of each sentence."""
        return tuple(diff.walk for diff in self.diffs)

    @property
    def differs(self) -> bool:
        """Whether the implementation differs from the oracle in some sentence."""
        return any(diff.first is not None for diff in self.diffs)

    @property
    def is_checked(self) -> bool:
        """Whether anything of it was compared."""
        return any(diff.comparisons for diff in self.diffs)

    def json(self, first_difference: list[str], files: list[str]) -> Json:
        """Everything as JSON can hold it: a number that is not finite is the text "-inf", "inf" or "nan"."""
        with_scale, without = self.growth
        return {
            "implementation": self.implementation,
            "differs": self.differs,
            "first_difference": first_difference,
            "sentences": [
                diff.walk.json()
                | {"unseen": diff.unseen, "compared": [each.json(diff.walk.words) for each in diff.comparisons]}
                for diff in self.diffs
            ],
            "examples": [{"scores": scores, "weights": weights} for scores, weights in walkthrough.examples().values()],
            "growth": {
                "head_dim": walkthrough.WIDTHS,
                "num_keys": walkthrough.NUM_KEYS,
                "largest_weight_with_scale": listed(with_scale[:, 1]),
                "largest_weight_without": listed(without[:, 1]),
            },
            "files": files,
        }


def look(name: str, sentences: Sequence[str], settings: Sequence[str] = (), seed: int = 0) -> Inspection:
    """Inspect the implementation `name` (or path/to/file.py:Name) on these sentences.

    Raises:
        ValueError: an implementation that cannot be found, a sentence without words, or settings that cannot be.
    """
    plugins.check_specs([name])
    parted = walkthrough.split(sentences or [walkthrough.DEFAULT])
    walks = [walkthrough.walk(words, walkthrough.workload(len(words), settings, seed)) for words in parted]
    implementation = oracle_diff.load(name)
    joined = None
    row = tuple(word for words in parted for word in words)
    if len(parted) > 1 and len(row) <= MOST_JOINED_WORDS:  # all in one row, where every word sees every other
        joined = walkthrough.walk(row, walkthrough.workload(len(row), settings, seed, mask="none"))
    return Inspection(
        spec=name,
        implementation=plugins.name_of(name),
        diffs=tuple(oracle_diff.compare(implementation, walk) for walk in walks),
        joined=joined,
        growth=walkthrough.growth(seed),
    )
