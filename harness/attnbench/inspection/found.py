"""What an inspection found, as plain numbers, for the terminal, the pictures and the page. Knows nothing of torch.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width, D embedding
width. Every walk has B=1 and T=S, the number of words.
"""

import enum
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from attnbench.reports.words import plain
from attnbench.workloads.workload import Workload

Numbers = npt.NDArray[np.float64]
Place = tuple[int, ...]
TOLERANCE = 1e-5
"""What float32 may differ from float64 here, as a part of the largest value: some hundred roundings."""
WORD_LEN = 14


def shape_of(letters: str, shape: tuple[int, ...]) -> str:
    """A shape with its letters: "(B=1, H=2, T=5, K=4)"."""
    return f"({', '.join(f'{letter}={size}' for letter, size in zip(letters, shape, strict=True))})"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step of the textbook form made, in float64."""

    name: str
    letters: str  # of its axes: "BHTS"
    values: Numbers
    told: str  # what the step does, in a sentence

    @property
    def shape(self) -> str:
        """With letters."""
        return shape_of(self.letters, self.values.shape)

    @property
    def tables(self) -> list[Numbers]:
        """A table for each head; one alone where there are no heads."""
        return list(self.values[0]) if len(self.letters) == len("BHTS") else [self.values[0]]


@dataclass(frozen=True, kw_only=True)
class Masking:
    """What a mask changes: the weights (H, T, S) without any and under it."""

    mask: str
    summary: str
    is_chosen: bool  # False: the workload has no mask, and this one is an example
    seen: npt.NDArray[np.bool_]  # (T, S)
    without: Numbers
    under: Numbers

    @property
    def is_felt(self) -> bool:
        """Whether any weight is another one under the mask."""
        return bool((self.without != self.under).any())


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One sentence through every step."""

    words: tuple[str, ...]
    workload: Workload
    steps: tuple[Step, ...]
    masking: Masking
    scaling: tuple["Softness", ...]  # of this sentence's scores, unmasked

    @property
    def labels(self) -> list[str]:
        """The words as headings: one short line each, without control characters."""
        return [plain(word, limit=WORD_LEN) or "?" for word in self.words]

    def step(self, name: str) -> Step:
        """The step of that name."""
        return next(step for step in self.steps if step.name == name)


@dataclass(frozen=True, kw_only=True)
class Softness:
    """How far a softmax spreads: from all keys alike to one alone."""

    name: str
    largest: float  # the largest weight, a mean over all queries
    entropy: float  # in bits, a mean over all queries: log2(S) where all keys count alike, 0 where one has all


@dataclass(frozen=True, kw_only=True)
class Example:
    """A softmax by itself."""

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
    """How something of an implementation compares with the oracle."""

    agrees = "agrees"
    differs = "DIFFERS"
    its_own = "its own way"  # unlike the contract's, with a right output: nobody's business


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Something that an implementation made, beside the oracle's."""

    name: str
    step: str
    letters: str
    oracle: Numbers
    here: Numbers | None  # None: it made none
    trouble: str = ""  # what happened instead, in words
    is_private: bool = False  # the output is right, and this is how it gets there

    @property
    def allowed(self) -> float:
        """The largest difference that counts as none."""
        return TOLERANCE * float(np.abs(self.oracle).max(initial=0.0))

    @cached_property
    def differences(self) -> Numbers | None:
        """Absolute; infinite where a value is not finite."""
        if self.here is None:
            return None
        gap = np.abs(np.where(np.isfinite(self.here), self.here, 0.0) - self.oracle)
        return np.where(np.isfinite(self.here), gap, np.inf)

    @property
    def largest(self) -> float:
        """The largest difference."""
        return np.inf if self.differences is None else float(self.differences.max(initial=0.0))

    @property
    def place(self) -> Place | None:
        """Where the largest difference is: the first of several."""
        if self.differences is None or not self.differences.size:
            return None
        return tuple(int(index) for index in np.unravel_index(self.differences.argmax(), self.differences.shape))

    @property
    def outcome(self) -> Outcome:
        """Whether it agrees."""
        if not self.trouble and self.largest <= self.allowed:
            return Outcome.agrees
        return Outcome.its_own if self.is_private else Outcome.differs

    def where(self, words: tuple[str, ...]) -> str:
        """The place of the largest difference: "head 1, query 'flies', key 'time'"."""
        if self.place is None:
            return ""
        shape = dict(zip(self.letters, self.oracle.shape, strict=True))
        at = dict(zip(self.letters, self.place, strict=True))
        parts = [f"head {at['H']}"] if "H" in at else []
        if "G" in at:
            parts.append(f"key/value head {at['G']}")
        names = {"T": "query" if self.step in {"weights", "context"} else "word"}
        names["S"] = "key" if self.letters.endswith("S") else "word"
        parts += [f"{name} {_quoted(words, at[letter])}" for letter, name in names.items() if letter in at]
        parts += [f"column {at[letter]}" for letter in "KVD" if letter in at and shape[letter] > 1]
        return ", ".join(parts)

    def values_there(self) -> tuple[float, float] | None:
        """This implementation's and the oracle's value at that place."""
        if self.here is None or self.place is None:
            return None
        return float(self.here[self.place]), float(self.oracle[self.place])


def _quoted(words: tuple[str, ...], index: int) -> str:
    told = f"'{plain(words[index], limit=WORD_LEN)}'"
    return told if words.count(words[index]) == 1 else f"{told} (word {index + 1})"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """An implementation beside the oracle on one sentence."""

    words: tuple[str, ...]
    compared: tuple[Compared, ...] = ()
    unseen: str = ""  # why its steps cannot be seen, or why it cannot be tried at all

    @property
    def first(self) -> Compared | None:
        """The first step that differs."""
        return next((each for each in self.compared if each.outcome is Outcome.differs), None)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything that one inspection found: for each sentence a walk, and the implementation beside the oracle."""

    spec: str  # as it was given
    implementation: str
    walks: tuple[Walk, ...]
    besides: tuple[Beside, ...]
    joined: Walk | None  # the sentences in one row without a mask, where there are several
    examples: tuple[Example, ...]
    growth: Growth

    @property
    def differs(self) -> bool:
        """Whether the implementation differs from the oracle in some sentence."""
        return any(beside.first is not None for beside in self.besides)

    @property
    def is_checked(self) -> bool:
        """Whether anything of it was compared."""
        return any(beside.compared for beside in self.besides)
