"""The results of an inspection as plain numbers, and as JSON; without torch.

Shapes as in the contract. Every walkthrough has B=1 and T=S, the number of words.
"""

import enum
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnbench.units import plain
from attnbench.workloads.workload import Workload

Numbers = npt.NDArray[np.float64]
Json = dict[str, object]
TOLERANCE = 1e-5
"""How far float32 may differ from float64 here, as a share of the largest value: some hundred roundings."""
WORD_LEN = 14


def shape_of(letters: str, shape: tuple[int, ...]) -> str:
    """A shape with its letters: "(B=1, H=2, T=5, K=4)"."""
    return f"({', '.join(f'{letter}={size}' for letter, size in zip(letters, shape, strict=True))})"


@dataclass(frozen=True, kw_only=True)
class Step:
    """The result of one step of the textbook form, in float64."""

    name: str
    letters: str  # of its axes: "BHTS"
    values: Numbers
    description: str  # what the step does, in a sentence

    @property
    def shape(self) -> str:
        """The shape with its letters."""
        return shape_of(self.letters, self.values.shape)

    @property
    def tables(self) -> list[Numbers]:
        """A table for each head; one alone where there are no heads."""
        return list(self.values[0]) if len(self.letters) == len("BHTS") else [self.values[0]]


@dataclass(frozen=True, kw_only=True)
class MaskEffect:
    """What a mask changes: the weights (H, T, S) without a mask and under it."""

    mask: str
    summary: str
    is_chosen: bool  # False: the workload has no mask, and this one is an example
    seen: npt.NDArray[np.bool_]  # (T, S)
    without: Numbers
    under: Numbers

    @property
    def has_effect(self) -> bool:
        """Whether the mask changes any weight."""
        return bool((self.without != self.under).any())


@dataclass(frozen=True, kw_only=True)
class Softness:
    """How far a softmax spreads: from equal weights to a single key."""

    name: str
    largest: float  # the largest weight, a mean over all queries
    entropy: float  # in bits, a mean over all queries: log2(S) for equal weights, 0 where one key has all


@dataclass(frozen=True, kw_only=True)
class Walkthrough:
    """One sentence through every step."""

    words: tuple[str, ...]
    workload: Workload
    steps: tuple[Step, ...]
    mask: MaskEffect
    scaling: tuple[Softness, ...]  # of this sentence's scores, unmasked

    @property
    def labels(self) -> list[str]:
        """The words as headings: one short line each, without control characters."""
        return [plain(word, limit=WORD_LEN) or "?" for word in self.words]

    def step(self, name: str) -> Step:
        """The step of that name."""
        return next(step for step in self.steps if step.name == name)

    def json(self) -> Json:
        """The walkthrough as JSON can hold it."""
        return {
            "words": self.words,
            "workload": self.workload.axes(),
            "steps": [{"name": step.name, "shape": step.shape, "values": listed(step.values)} for step in self.steps],
            "mask": self.mask.mask,
            "weights_without_mask": listed(self.mask.without),
            "weights_under_mask": listed(self.mask.under),
            "softness": [
                {"softmax_of": each.name, "largest": each.largest, "entropy_bits": each.entropy}
                for each in self.scaling
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Example:
    """The softmax of a few numbers."""

    name: str
    scores: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The largest weight against the head width K, for random query and keys: quartiles (len(widths), 3)."""

    num_keys: int
    widths: tuple[int, ...]
    with_scale: Numbers
    without: Numbers


class Outcome(enum.StrEnum):
    """How a step of an implementation compares with the oracle's."""

    agrees = "agrees"
    differs = "DIFFERS"
    its_own = "its own way"  # unlike the contract's, while the output is right


class Comparison:
    """What an implementation computed in one step, and what the oracle did."""

    def __init__(  # noqa: PLR0913 - as many as a comparison has
        self,
        name: str,
        *,
        step: str,
        letters: str,
        oracle: Numbers,
        actual: Numbers | None = None,
        trouble: str = "",
        is_private: bool = False,
    ) -> None:
        """Compare; without `actual` there is nothing to compare, and `trouble` says in words what happened instead.

        `is_private` says that the output is right, and this is how it gets there.
        """
        self.name, self.step, self.letters, self.oracle = name, step, letters, oracle
        self.actual, self.trouble = actual, trouble
        self.tolerance = TOLERANCE * float(np.abs(oracle).max(initial=0.0))  # a difference up to this counts as none
        self.differences: Numbers | None = None  # absolute; infinite where a value is not finite
        self.largest = np.inf
        self.place: tuple[int, ...] | None = None  # of the largest difference: the first of several
        if actual is not None:
            is_finite = np.isfinite(actual)
            self.differences = np.where(is_finite, np.abs(np.where(is_finite, actual, 0.0) - oracle), np.inf)
            self.largest = float(self.differences.max(initial=0.0))
            if self.differences.size:
                place = np.unravel_index(self.differences.argmax(), self.differences.shape)
                self.place = tuple(int(index) for index in place)
        self.outcome = Outcome.its_own if is_private else Outcome.differs
        if not trouble and self.largest <= self.tolerance:
            self.outcome = Outcome.agrees

    def where(self, words: tuple[str, ...]) -> str:
        """The place of the largest difference: "head 1, query 'flies', key 'time'"."""
        if self.place is None:
            return ""
        shape = dict(zip(self.letters, self.oracle.shape, strict=True))
        at = dict(zip(self.letters, self.place, strict=True))
        parts = [f"{name} {at[letter]}" for letter, name in (("H", "head"), ("G", "key/value head")) if letter in at]
        names = {"T": "query" if self.step in {"weights", "context"} else "word"}
        names["S"] = "key" if self.letters.endswith("S") else "word"
        for letter in (each for each in names if each in at):
            word = words[at[letter]]
            number = "" if words.count(word) == 1 else f" (word {at[letter] + 1})"
            parts.append(f"{names[letter]} '{plain(word, limit=WORD_LEN)}'{number}")
        parts += [f"column {at[letter]}" for letter in "KVD" if letter in at and shape[letter] > 1]
        return ", ".join(parts)

    def values_there(self) -> tuple[float, float] | None:
        """The implementation's and the oracle's value at that place."""
        if self.actual is None or self.place is None:
            return None
        return float(self.actual[self.place]), float(self.oracle[self.place])

    def json(self, words: tuple[str, ...]) -> Json:
        """The comparison as JSON can hold it."""
        return {
            "name": self.name,
            "step": self.step,
            "outcome": str(self.outcome).lower(),
            "trouble": self.trouble,
            "largest_difference": _number(self.largest),
            "allowed": self.tolerance,
            "place": self.place,
            "where": self.where(words),
            "values": None if self.actual is None else listed(self.actual),
            "oracle": listed(self.oracle),
        }


@dataclass(frozen=True, kw_only=True)
class OracleDiff:
    """The comparisons of an implementation with the oracle on one sentence."""

    words: tuple[str, ...]
    comparisons: tuple[Comparison, ...] = ()
    unseen: str = ""  # why its steps cannot be seen, or why it cannot be tried at all

    @property
    def first(self) -> Comparison | None:
        """The first step that differs."""
        return next((each for each in self.comparisons if each.outcome is Outcome.differs), None)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All results: for each sentence a walkthrough, and the implementation compared with the oracle."""

    spec: str  # as it was given
    implementation: str
    walks: tuple[Walkthrough, ...]
    diffs: tuple[OracleDiff, ...]
    joined: Walkthrough | None  # the sentences in one row without a mask, where there are several
    examples: tuple[Example, ...]
    growth: Growth

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
        return {
            "implementation": self.implementation,
            "differs": self.differs,
            "first_difference": first_difference,
            "sentences": [
                {**walk.json(), "unseen": diff.unseen, "compared": [each.json(diff.words) for each in diff.comparisons]}
                for walk, diff in zip(self.walks, self.diffs, strict=True)
            ],
            "examples": [{"scores": each.scores, "weights": each.weights} for each in self.examples],
            "growth": {
                "head_dim": self.growth.widths,
                "num_keys": self.growth.num_keys,
                "largest_weight_with_scale": listed(self.growth.with_scale[:, 1]),
                "largest_weight_without": listed(self.growth.without[:, 1]),
            },
            "files": files,
        }


def listed(values: Numbers) -> object:
    """An array as nested lists."""
    return [listed(part) for part in values] if values.ndim else _number(float(values))


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
