"""Masks that change scores by a rule of a few words: penalties on distance, a soft limit."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from attnbench.workloads.masks.rule import Array, Mask

STEEPEST = 8.0
"""The slopes of 2^n heads are 2^(-8/2^n), its square, its cube, ... down to 2^-8."""


class Alibi(Mask):
    """Attention with linear biases: each score less a head's slope times the distance, positions from the start.

    The paper uses it with the causal mask, `causal+alibi`; alone it is the symmetric form.
    Source: https://arxiv.org/abs/2108.12409; slopes for other numbers of heads as in
    https://github.com/ofirpress/attention_with_linear_biases
    """

    name = "alibi"
    summary = "query i takes slope * |i-j| from its score for key j, slopes 2^(-8h/H) (ALiBi), aligned at the start"
    usage = "alibi"
    changes_scores = True

    def per_head(self, num_heads: int) -> npt.NDArray[np.float64]:
        """The slopes (H,): a geometric row for a power of 2, else filled up with every other one of the next row."""
        whole = 2 ** int(math.log2(num_heads))
        head, more = np.arange(1, whole + 1), np.arange(num_heads - whole)
        exponents = np.concatenate([head * STEEPEST / whole, (2 * more + 1) * STEEPEST / (2 * whole)])
        slopes: npt.NDArray[np.float64] = np.exp2(-exponents)
        return slopes

    def bias(self, per_head: Any, query: Array, key: Array, offset: int) -> Any:  # noqa: ANN401, ARG002
        """The further apart, the less."""
        return -per_head * abs(query - key)


class AlibiBottomRight(Alibi):
    """The same with positions counted from the end, as in decoding and in flash-attn."""

    name = "alibi_bottom_right"
    summary = "query i takes slope * |i+S-T-j| from its score for key j (ALiBi), aligned at the end"
    usage = "alibi_bottom_right"

    def bias(self, per_head: Any, query: Array, key: Array, offset: int) -> Any:  # noqa: ANN401
        """The further apart, the less."""
        return super().bias(per_head, query + offset, key, offset)


class Softcap(Mask):
    """Scores squashed to +-x by x * tanh(score / x) (Gemma 2, https://arxiv.org/abs/2408.00118, section 2)."""

    name = "softcap"
    summary = "squashes the scores into -x..x: x * tanh(score / x)"
    usage = "softcap(x), x at least 1"
    num_arguments = (1, 1)
    changes_scores = True
    is_additive = False

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:  # noqa: ARG002
        """A limit of 0 divides by 0."""
        if self.arguments[0] < 1:
            raise ValueError(f"mask={self} is not allowed: write it as {self.usage}")

    def transform(self, score: Any) -> Any:  # noqa: ANN401
        """Nearly the score where it is small."""
        return (score / self.arguments[0]).tanh() * self.arguments[0]

    def derivative(self, score: Any) -> Any:  # noqa: ANN401
        """1 - tanh^2."""
        return 1.0 - (score / self.arguments[0]).tanh() ** 2
