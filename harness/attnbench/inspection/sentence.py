"""Words made into inputs: a seeded vector for each word, the same in every sentence, and the workload that follows.

No position is added, so that a word has the same query, key and value wherever it stands.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attnbench.checking.inputs import Inputs, draw_weights, generator
from attnbench.workloads import sweep
from attnbench.workloads.workload import Workload

DEFAULT = "time flies like an arrow"
DEFAULTS = {"num_heads": "2", "head_dim": "4", "mask": "causal"}
AXES = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "embed_dim", "mask")
"""What can be set; the other axes follow from the sentence, or are as they are to keep things small and exact."""
MOST_WORDS, MOST_SENTENCES, MOST_HEADS, LARGEST_WIDTH = 24, 4, 8, 1024


def split(sentences: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Each sentence as its words, parted by white space.

    Raises:
        ValueError: a sentence without words, too many words or too many sentences to be looked at.
    """
    told = tuple(tuple(sentence.split()) for sentence in sentences)
    for words in told:
        if not words:
            raise ValueError(f'--sentence "" has no words: give at least one, as in --sentence "{DEFAULT}"')
        if len(words) > MOST_WORDS:
            raise ValueError(f"a sentence of {len(words)} words is too long to look at: give at most {MOST_WORDS}")
    if len(told) > MOST_SENTENCES:
        raise ValueError(f"{len(told)} sentences are too many to look at: give at most {MOST_SENTENCES}")
    return told


def workload(num_words: int, settings: Sequence[str], seed: int, *, mask: str | None = None) -> Workload:
    """One sentence as a workload of scope `module`; `mask`, where given, in place of the settings'.

    Raises:
        ValueError: an axis that does not exist or cannot be set here, several values for one, or a value that no
            attention can have or that is too large to be looked at.
    """
    chosen: dict[str, str] = {}
    for axis, values in sweep.parse_settings(settings).items():
        if axis not in AXES:
            raise ValueError(f"--set {axis} is not for inspect: the words and --seed decide; set {', '.join(AXES)}")
        if len(values) != 1:
            raise ValueError(f"--set {axis}={','.join(values)} is not allowed: inspect takes one value of an axis")
        chosen[axis] = values[0]
    usual = {axis: value for axis, value in DEFAULTS.items() if axis != "head_dim" or "embed_dim" not in chosen}
    made = usual | chosen | ({} if mask is None else {"mask": mask})
    point = sweep.make(made | {"seq_len": num_words, "scope": "module", "direction": "inference", "seed": seed})
    if point.num_heads > MOST_HEADS or max(point.head_dim, point.value_dim, point.embed_dim) > LARGEST_WIDTH:
        limits = f"at most {MOST_HEADS} heads and widths of at most {LARGEST_WIDTH}"
        raise ValueError(f"{point.num_heads} heads of width {point.head_dim} are too many to look at: choose {limits}")
    return point


def embed(words: Sequence[str], point: Workload) -> Tensor:
    """(T, D) in float64: for each word a standard normal vector drawn from the seed and the word alone."""
    rows = []
    for word in words:
        digest = int.from_bytes(hashlib.sha256(word.encode(errors="surrogateescape")).digest()[:6], "big")
        draws = generator(point.seed, 4, digest)
        rows.append(torch.randn(point.embed_dim, generator=draws, dtype=torch.float64))
    return torch.stack(rows)


def inputs(words: Sequence[str], point: Workload) -> Inputs:
    """Tensor x (B=1, T, D) and the canonical weights in float64, rounded to float32: both forms get the same."""
    drawn = Inputs(tensors={"x": embed(words, point)[None]}, weights=draw_weights(point))
    return drawn.map(lambda tensor: tensor.float().double())
