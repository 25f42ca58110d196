"""The scaling experiment: how sharp a softmax is with and without the division by sqrt(K), and why it matters.

Source: https://arxiv.org/abs/1706.03762, section 3.2.1: the scores of random vectors grow as sqrt(K), and a softmax of
large scores is all but 0 or 1, where its gradient is all but 0.
"""

import math

import torch
from torch import Tensor

from attnbench.inspection.found import Example, Growth, Softness

SCORES = (0.1, -0.2, 0.3, -0.2, 0.5)
FACTOR = 100
WIDTHS = tuple(2**power for power in range(11))
NUM_KEYS = 16
NUM_DRAWS = 400


def example(name: str, scores: tuple[float, ...]) -> Example:
    """The softmax of some scores."""
    weights = torch.tensor(scores, dtype=torch.float64).softmax(dim=0)
    return Example(name=name, scores=scores, weights=tuple(weights.tolist()))


def examples() -> tuple[Example, ...]:
    """A few numbers, the same numbers times 100, and three scores of which one grows."""
    return (
        example("a vector", SCORES),
        example(f"the same times {FACTOR}", tuple(FACTOR * score for score in SCORES)),
        example("three scores", (20.0, 21.5, 22.0)),
        example("one of them larger by 4", (20.0, 21.5, 26.0)),
    )


def softness(name: str, scores: Tensor) -> Softness:
    """Of the softmax over the last axis of scores (..., S): means over all the others."""
    weights = scores.softmax(dim=-1)
    entropy = torch.special.entr(weights).sum(dim=-1) / math.log(2)
    return Softness(name=name, largest=float(weights.amax(dim=-1).mean()), entropy=float(entropy.mean()))


def of_scores(scores: Tensor, head_dim: int) -> tuple[Softness, ...]:
    """Of scores (..., S), which are divided by sqrt(K): as they are, without that division, and for comparison."""
    root = math.sqrt(head_dim)
    return (
        softness("query @ key / sqrt(K)", scores),
        softness("query @ key", scores * root),
        softness(f"query @ key / sqrt(K), times {FACTOR}", scores * FACTOR),
    )


def growth(seed: int) -> Growth:
    """The largest weight of a random query over 16 random keys, against K: lower quartile, median, upper quartile."""
    draws = torch.Generator().manual_seed(seed)
    kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
    quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    for width in WIDTHS:
        query = torch.randn(NUM_DRAWS, 1, width, generator=draws, dtype=torch.float64)
        key = torch.randn(NUM_DRAWS, NUM_KEYS, width, generator=draws, dtype=torch.float64)
        scores = (query @ key.transpose(-2, -1))[:, 0]  # (draws, S)
        for kept, divisor in zip(kinds, (math.sqrt(width), 1.0), strict=True):
            kept.append((scores / divisor).softmax(dim=-1).amax(dim=-1).quantile(quarters))
    with_scale, without = (torch.stack(kept).numpy() for kept in kinds)
    return Growth(num_keys=NUM_KEYS, widths=WIDTHS, with_scale=with_scale, without=without)
