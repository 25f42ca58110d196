"""Attention in the textbook form, a step at a time, so that each step can be shown, or changed to plant a mistake.

The steps in order, and what each makes: `projection` query, key and value; `heads` a key/value head for every query
head; `scores`; `masked scores`; `weights`; `context` (B, H, R, V); `output` (B, R, D) in scope `module`.
Source: https://arxiv.org/abs/1706.03762, section 3.2. Shapes: R chosen queries; the other letters as everywhere.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnbench.contract import BoundMask, Weights, repeat_heads
from attnbench.contract.bound_mask import on_device
from attnbench.workloads.masks import Mask

STEPS = ("projection", "heads", "scores", "masked scores", "weights", "context", "output")
Changes = Mapping[str, Callable[..., Any]]
"""For some of the steps, the function that takes its place: same operands, same kind of result."""
Change = Callable[[Tensor, Mask, "Scene"], Tensor]
"""What becomes of scores (B, H, R, S) by a part of the mask."""
FLOAT32_BITS = 32


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a step may look at besides its operands: the mask, and which queries are at hand."""

    mask: BoundMask
    rows: Tensor  # (R,) their indices

    @property
    def queries(self) -> Tensor:
        """The index of each query at hand (R, 1)."""
        return self.rows[:, None]

    @cached_property
    def keys(self) -> Tensor:
        """The index of each key (S,)."""
        return torch.arange(self.mask.sizes[2], device=self.rows.device)

    @cached_property
    def seen(self) -> Tensor:
        """Which keys each query sees under the mask (B, 1, R, S)."""
        return self.seen_under(self.mask.rule)

    def seen_under(self, rule: Mask) -> Tensor:
        """Which keys each query sees under another rule (B, 1, R, S)."""
        batch_size, query_len, key_len = self.mask.sizes
        table = on_device(rule.table(batch_size, query_len, key_len), self.rows.device)
        batch = torch.arange(batch_size, device=self.rows.device)[:, None, None, None]
        seen: Tensor = rule.sees(batch, self.queries, self.keys, table, key_len - query_len)
        return seen.expand(batch_size, 1, len(self.rows), key_len)

    def bias(self, part: Mask) -> Tensor:
        """What an additive part of the mask adds to the scores (H, R, S), in float64."""
        _, query_len, key_len = self.mask.sizes
        per_head = on_device(part.per_head(self.mask.num_heads), self.rows.device)[:, None, None]
        bias: Tensor = part.bias(per_head, self.queries, self.keys, key_len - query_len)
        return bias.double()


def product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product summed in float32 at least and rounded to the operands' dtype, as hardware does it."""
    if torch.finfo(left.dtype).bits < FLOAT32_BITS:
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


def heads(query: Tensor, key: Tensor, value: Tensor, scene: Scene) -> tuple[Tensor, Tensor]:
    """Key (B, G, S, K) -> (B, H, S, K) and value likewise: query head h reads key/value head h // (H / G)."""
    return repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])


def scores(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """(B, H, R, K), (B, H, S, K) -> (B, H, R, S)."""
    return product(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])


def as_the_mask_says(scores: Tensor, part: Mask, scene: Scene) -> Tensor:
    """One part's change of the scores (B, H, R, S)."""
    return scores + scene.bias(part).to(scores.dtype) if part.is_additive else part.bend(scores)


def changed(scores: Tensor, scene: Scene, change: Change = as_the_mask_says) -> Tensor:
    """The scores (B, H, R, S) as the mask's parts change them, one after the other, none hidden yet."""
    for part in scene.mask.rule.changes:
        scores = change(scores, part, scene)
    return scores


def masked_scores(scores: Tensor, scene: Scene) -> Tensor:
    """The scores are changed where the mask says so, then hidden keys get -inf."""
    return changed(scores, scene).masked_fill(~scene.seen, -math.inf)


def weights(masked: Tensor, scene: Scene) -> Tensor:
    """Softmax over the keys; a query that sees no key gives each of them 0."""
    empty = (masked == -math.inf).all(dim=-1, keepdim=True)
    return masked.softmax(dim=-1).masked_fill(empty, 0.0)


def context(weights: Tensor, value: Tensor, scene: Scene) -> Tensor:
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
    query: Tensor, key: Tensor, value: Tensor, scene: Scene, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Each step's result by its name, from `scores` to `context`; `key` and `value` are as `heads` makes them.

    Query (B, H, R, K), key (B, G, S, K), value (B, G, S, V).
    """
    step = {**DEFAULTS, **(changes or {})}
    made: dict[str, Tensor] = {"query": query}
    made["key"], made["value"] = step["heads"](query, key, value, scene)
    made["scores"] = step["scores"](query, made["key"], scene)
    made["masked scores"] = step["masked scores"](made["scores"], scene)
    made["weights"] = step["weights"](made["masked scores"], scene)
    made["context"] = step["context"](made["weights"], made["value"], scene)
    return made


def attend_tokens(
    x: Tensor, context: Tensor, module_weights: Weights, scene: Scene, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Every step's result by its name. x (B, R, D), context (B, S, D); `output` is (B, R, D)."""
    step = {**DEFAULTS, **(changes or {})}
    query, key, value = step["projection"](x, context, module_weights)
    made = attend(query, key, value, scene, changes)
    return made | {"output": step["output"](made["context"], module_weights)}
