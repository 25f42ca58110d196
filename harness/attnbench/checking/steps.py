"""Attention in the textbook form, step by step, so that each step can be shown, or replaced to plant a mistake.

The steps in order, and what each computes: `projection` query, key and value; `heads` a key/value head for every query
head; `scores`; `masked scores`; `weights`; `context` (B, H, R, V); `output` (B, R, D) in scope `module`.
Source: https://arxiv.org/abs/1706.03762, section 3.2. Shapes: R chosen queries; the other letters as everywhere.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnbench.checking.oracle import RowMask
from attnbench.contract import Weights, repeat_heads

Changes = Mapping[str, Callable[..., Any]]
"""The functions that replace some of the steps: same operands, same kind of result."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product summed in float32 at least and rounded to the operands' dtype, as hardware does it."""
    if torch.finfo(left.dtype).bits < 32:  # noqa: PLR2004 - float32's
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def project(x: Tensor, context: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """(B, R, D), (B, S, D) -> query (B, H, R, K), key (B, G, S, K), value (B, G, S, V)."""

    def through(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        projected = product(tokens[:, None], weight.transpose(-2, -1))  # (B,1,R,D) @ (H,D,K) -> (B,H,R,K)
        return projected if bias is None else projected + bias[:, None]

    return (
        through(x, weights.query, weights.query_bias),
        through(context, weights.key, weights.key_bias),
        through(context, weights.value, weights.value_bias),
    )


def heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> tuple[Tensor, Tensor]:
    """Key (B, G, S, K) -> (B, H, S, K) and value likewise: query head h reads key/value head h // (H / G)."""
    return repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])


def scores(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """(B, H, R, K), (B, H, S, K) -> (B, H, R, S)."""
    return product(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])


def hide(scores: Tensor, seen: Tensor) -> Tensor:
    """The scores with -inf at the keys that are not seen."""
    return scores.masked_fill(~seen, -math.inf)


def masked_scores(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores as the mask changes them, with -inf at the hidden keys."""
    return hide(mask.changed(scores), mask.seen)


def weights(masked: Tensor, mask: RowMask) -> Tensor:
    """Softmax over the keys; a query that sees no key gives each of them 0."""
    empty = (masked == -math.inf).all(dim=-1, keepdim=True)
    return masked.softmax(dim=-1).masked_fill(empty, 0.0)


def context(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """(B, H, R, S), (B, H, S, V) -> (B, H, R, V)."""
    return product(weights, value)


def output(context: Tensor, weights: Weights) -> Tensor:
    """Heads side by side, then the output projection where there is one: (B, H, R, V) -> (B, R, D), or (B, R, H*V)."""
    merged = context.transpose(1, 2).flatten(2)
    if weights.out is None:
        return merged
    projected = product(merged, weights.out.T)
    return projected if weights.out_bias is None else projected + weights.out_bias


DEFAULTS: Changes = {
    "projection": project,
    "heads": heads,
    "scores": scores,
    "masked scores": masked_scores,
    "weights": weights,
    "context": context,
    "output": output,
}


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Each step's result by its name, from `scores` to `context`; `key` and `value` are as `heads` makes them.

    Query (B, H, R, K), key (B, G, S, K), value (B, G, S, V).
    """
    step = {**DEFAULTS, **(changes or {})}
    made: dict[str, Tensor] = {"query": query}
    made["key"], made["value"] = step["heads"](query, key, value, mask)
    made["scores"] = step["scores"](query, made["key"], mask)
    made["masked scores"] = step["masked scores"](made["scores"], mask)
    made["weights"] = step["weights"](made["masked scores"], mask)
    made["context"] = step["context"](made["weights"], made["value"], mask)
    return made


def attend_tokens(
    x: Tensor, context: Tensor, module_weights: Weights, mask: RowMask, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Every step's result by its name. x (B, R, D), context (B, S, D); `output` is (B, R, D)."""
    step = {**DEFAULTS, **(changes or {})}
    query, key, value = step["projection"](x, context, module_weights)
    made = attend(query, key, value, mask, changes)
    return made | {"output": step["output"](made["context"], module_weights)}
