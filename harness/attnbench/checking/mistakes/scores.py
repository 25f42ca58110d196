"""Mistakes in the scores: how query and key are multiplied and scaled."""

import math

from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Scene, product
from attnbench.workloads.workload import Workload


def _scaled_by(divisor: float, query: Tensor, key: Tensor) -> Tensor:
    return product(query, key.transpose(-2, -1)) / divisor


def no_scale(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """Query @ key."""
    return product(query, key.transpose(-2, -1))


def scaled_by_width(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """Query @ key / K."""
    return _scaled_by(query.shape[-1], query, key)


def scaled_by_embedding(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """Query @ key / sqrt(H * K)."""
    return _scaled_by(math.sqrt(query.shape[1] * query.shape[-1]), query, key)


def multiplied_by_root(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """Query @ key * sqrt(K)."""
    return _scaled_by(1 / math.sqrt(query.shape[-1]), query, key)


def swapped(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """The score of query i with key j where that of query j with key i belongs."""
    return product(key, query.transpose(-2, -1)) / math.sqrt(query.shape[-1])


def _is_square(workload: Workload) -> bool:
    return workload.seq_len == workload.kv_len


MISTAKES = (
    Mistake(name="no_scale", words="the scores are not divided by sqrt(K)", changes={"scores": no_scale}),
    Mistake(
        name="scaled_by_width",
        words="the scores are divided by K, or twice by sqrt(K), instead of once by sqrt(K)",
        changes={"scores": scaled_by_width},
    ),
    Mistake(
        name="scaled_by_embedding",
        words="the scores are divided by the root of all heads' width, sqrt(H*K), instead of one head's, sqrt(K)",
        changes={"scores": scaled_by_embedding},
    ),
    Mistake(
        name="multiplied_by_root",
        words="the scores are multiplied by sqrt(K) instead of divided",
        changes={"scores": multiplied_by_root},
    ),
    Mistake(
        name="query_key_swapped",
        words="query and key have changed places in the scores: entry (i, j) holds the score of query j with key i",
        changes={"scores": swapped},
        fits=_is_square,
        needs_all_rows=True,
    ),
)
