"""A sentence through the textbook form in float64, step by step.

Each word becomes a seeded vector, the same in every sentence. No position is added, so that a word has the same query,
key and value at every place.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from attnbench.checking import oracle, steps
from attnbench.checking.case import Inputs, draw_operands, draw_weights, generator
from attnbench.units import plain
from attnbench.workloads import sweep
from attnbench.workloads.workload import Workload

Numbers = npt.NDArray[np.float64]
PROJECTED = ("query", "key", "value")
LETTERS = {
    "x": "BTD",
    "query": "BHTK",
    "key": "BGSK",
    "value": "BGSV",
    "scores": "BHTS",
    "masked scores": "BHTS",
    "weights": "BHTS",
    "context": "BHTV",
    "output": "BTD",
}
"""The axes of each step's result, in order; every walkthrough has B=1 and T=S, the number of words."""
WORD_LEN = 14
DEFAULT = "time flies like an arrow"
DEFAULTS = {"num_heads": "2", "head_dim": "4", "mask": "causal"}
AXES = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "embed_dim", "mask")  # that can be set
MOST_WORDS, MOST_SENTENCES, MOST_HEADS, LARGEST_WIDTH = 24, 4, 8, 1024


def shape_of(letters: str, shape: tuple[int, ...]) -> str:
    """A shape with a letter for each axis: "(B=1, H=2, T=5, K=4)"."""
    return f"({', '.join(f'{letter}={size}' for letter, size in zip(letters, shape, strict=True))})"


@dataclass(frozen=True, kw_only=True)
class Walkthrough:
    """One sentence through all steps."""

    words: tuple[str, ...]
    workload: Workload
    inputs: Inputs
    steps: dict[str, Numbers]  # the result of each step of the textbook form, in float64

    @property
    def labels(self) -> list[str]:
        """The words as headings: one short line each, without control characters."""
        return [plain(word, limit=WORD_LEN) or "?" for word in self.words]

    def sentence(self, limit: int = 0) -> str:
        """The words on one line, cut at `limit` characters if given."""
        return plain(" ".join(self.words), limit)

    def shape(self, name: str) -> str:
        """The shape of a step's result, as `shape_of` formats it."""
        return shape_of(LETTERS[name], self.steps[name].shape)


def split(sentences: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Split each sentence into words at white space.

    Raises:
        ValueError: a sentence has no words or too many, or there are too many sentences.
    """
    parted = tuple(tuple(sentence.split()) for sentence in sentences)
    if not all(parted):
        raise ValueError(f'--sentence "" has no words: give at least one, as in --sentence "{DEFAULT}"')
    if (longest := max(map(len, parted))) > MOST_WORDS:
        raise ValueError(f"a sentence of {longest} words is too long to look at: give at most {MOST_WORDS}")
    if len(parted) > MOST_SENTENCES:
        raise ValueError(f"{len(parted)} sentences are too many to look at: give at most {MOST_SENTENCES}")
    return parted


def workload(num_words: int, settings: Sequence[str], seed: int = 0) -> Workload:
    """One sentence as a workload of scope `module`.

    Raises:
        ValueError: an axis does not exist or cannot be set here, has several values, or a value is invalid or too
            large to inspect.
    """
    chosen: dict[str, str] = {}
    for axis, values in sweep.parse_settings(settings).items():
        if axis not in AXES:
            raise ValueError(f"--set {axis} is not for inspect: the words decide; set {', '.join(AXES)}")
        if len(values) != 1:
            raise ValueError(f"--set {axis}={','.join(values)} is not allowed: inspect takes one value of an axis")
        chosen[axis] = values[0]
    usual = {axis: value for axis, value in DEFAULTS.items() if axis != "head_dim" or "embed_dim" not in chosen}
    point = sweep.make(
        usual | chosen | {"seq_len": num_words, "scope": "module", "direction": "inference", "seed": seed}
    )
    if point.num_heads > MOST_HEADS or max(point.head_dim, point.value_dim, point.embed_dim) > LARGEST_WIDTH:
        limits = f"at most {MOST_HEADS} heads and widths of at most {LARGEST_WIDTH}"
        raise ValueError(f"{point.num_heads} heads of width {point.head_dim} are too many to look at: choose {limits}")
    return point


def inputs(words: Sequence[str], point: Workload) -> Inputs:
    """Tensor x (B=1, T, D) and the canonical weights in float64, rounded to float32, for both forms.

    Each word is a standard normal vector that depends only on the seed and the word.
    """
    rows = []
    for word in words:
        digest = int.from_bytes(hashlib.sha256(word.encode(errors="surrogateescape")).digest()[:6], "big")
        draws = generator(point.seed, 4, digest)
        rows.append(torch.randn(point.embed_dim, generator=draws, dtype=torch.float64))
    tensors = {"x": torch.stack(rows)[None]} | draw_operands(point, generator(point.seed, 5))
    drawn = Inputs(tensors=tensors, weights=draw_weights(point))
    return drawn.map(lambda tensor: tensor.float().double())


def walk(words: tuple[str, ...], point: Workload) -> Walkthrough:
    """Every step of the textbook form on one sentence, in float64."""
    drawn = inputs(words, point)
    x = drawn.tensors["x"]
    mask = oracle.row_mask(point, torch.arange(point.seq_len), inputs=drawn.tensors)
    results = steps.attend_tokens(x, x, drawn.weights, mask) | {"x": x}
    results |= zip(PROJECTED, oracle.project(x, x, drawn.weights), strict=True)
    numbers = {name: results[name].numpy() for name in LETTERS}
    return Walkthrough(words=words, workload=point, inputs=drawn, steps=numbers)
