"""Attention in plain PyTorch whose memory grows with the length, not its square: tiles and an online softmax.

A row of scores is never held whole. Each tile of keys updates the row's running maximum, its running sum of
exponentials and its accumulated output, which are rescaled whenever the maximum grows. The backward pass keeps the
row's logsumexp alone and makes the weights of each tile again; under dropout it drops the same ones again, since each
tile has a random generator of its own.

Source: M. Milakov and N. Gimelshein, https://arxiv.org/abs/1805.02867 (the softmax); M. N. Rabe and C. Staats,
https://arxiv.org/abs/2112.05682 (the memory); T. Dao et al., https://arxiv.org/abs/2205.14135 (the backward pass).

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width; t and s are the
queries and keys of one tile.

At its peak a call holds the output, the scaled query, the logsumexp, and a tile of scores: 2 B H T K + B H T numbers
and what does not grow with the length.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.contract import Attention, BoundMask, Implementation, Workload, product_flops, repeat_heads

TILE = 256
"""Queries and keys in a tile: (H, t, s) scores of 8 heads in float32 are 2 MiB, about what a core's cache holds."""


class Chunked(Attention):
    """Attend tile by tile, in float32 at least."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        key, value = (repeat_heads(tensor.to(dtype), query.shape[1]) for tensor in (key, value))  # -> (B,H,S,K)
        scaled = query.to(dtype) * mask.scale_for(query.shape[-1])
        sinks = None if mask.sinks is None else mask.sinks.to(dtype)[:, None, None]  # (H,) -> (H,1,1)
        drop = Drop(share=self.dropout, seed=int(torch.randint(2**31, ()))) if self.dropout else None
        attended: Tensor = TiledAttention.apply(scaled, key, value, sinks, mask, drop)  # type: ignore[no-untyped-call]
        return attended.to(query.dtype)


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Which weights are dropped, and by how much the others grow: the same at each call for a tile."""

    share: float
    seed: int

    def factor(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """What the weights of a tile (B, H, t, s) are multiplied by: 0, or 1 / (1 - share)."""
        tile = rows.start // TILE * 2**16 + keys.start // TILE
        own = torch.Generator(scores.device).manual_seed((self.seed + tile) % 2**32)
        return torch.empty_like(scores).bernoulli_(1 - self.share, generator=own).div_(1 - self.share)


class TiledAttention(torch.autograd.Function):
    """softmax(query @ key.T) @ value, forward and backward by tiles."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - three tensors and what is done to their products
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        mask: BoundMask,
        drop: Drop | None,
    ) -> Tensor:
        """Query (B, H, T, K) already scaled, key (B, H, S, K), value (B, H, S, V), sinks (H, 1, 1) -> (B, H, T, V)."""
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        logsumexp = query.new_empty(*query.shape[:-1], 1)
        for rows in tiles(query.shape[-2]):
            output[..., rows, :], logsumexp[..., rows, :] = attend_rows(  # nothing of it is kept for the next
                (query[..., rows, :], key, value), sinks, mask, rows, drop
            )
        ctx.save_for_backward(query, key, value, output, logsumexp, sinks)
        ctx.mask, ctx.drop = mask, drop
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradients of query, key and value, and of the sinks: a sink is one more key, whose value is 0."""
        query, key, value, output, logsumexp, sinks = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        correction = (grad_output * output).sum(dim=-1, keepdim=True)  # (B,H,T,V) -> (B,H,T,1)
        for rows in tiles(query.shape[-2]):
            row_query, row_grad = query[..., rows, :], grad_output[..., rows, :]
            for keys, scores in score_tiles(row_query, key, ctx.mask, rows):
                weights = exp_(scores.sub_(logsumexp[..., rows, :]))
                factor = None if ctx.drop is None else ctx.drop.factor(weights, rows, keys)
                used = weights if factor is None else weights * factor
                grad_value[..., keys, :] += used.transpose(-2, -1) @ row_grad  # (B,H,s,t) @ (B,H,t,V)
                grad_weights = row_grad @ value[..., keys, :].transpose(-2, -1)  # (B,H,t,V) @ (B,H,V,s)
                if factor is not None:
                    grad_weights.mul_(factor)
                grad_scores = grad_weights.sub_(correction[..., rows, :]).mul_(weights)
                if not ctx.mask.rule.is_additive:
                    grad_scores = before_change(grad_scores, (row_query, key), ctx.mask, rows, keys)
                grad_query[..., rows, :] += grad_scores @ key[..., keys, :]  # (B,H,t,s) @ (B,H,s,K)
                grad_key[..., keys, :] += grad_scores.transpose(-2, -1) @ row_query  # (B,H,s,t) @ (B,H,t,K)
        grad_sinks = None
        if sinks is not None:
            grad_sinks = (exp_(sinks - logsumexp).mul_(correction)).sum(dim=(0, 2), keepdim=True)[0].neg_()  # (H,1,1)
        return grad_query, grad_key, grad_value, grad_sinks, None, None


def attend_rows(
    given: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, mask: BoundMask, rows: slice, drop: Drop | None
) -> tuple[Tensor, Tensor]:
    """Query (B, H, t, K), key (B, H, S, K), value (B, H, S, V) -> output (B, H, t, V), logsumexp (B, H, t, 1).

    Where there are sinks (H, 1, 1), they are the first to be summed.
    """
    query, key, value = given
    maximum = query.new_full((*query.shape[:-1], 1), torch.finfo(query.dtype).min)  # finite: -inf - -inf is NaN
    total = torch.zeros_like(maximum)
    if sinks is not None:
        maximum, total = sinks.expand_as(maximum).clone(), torch.ones_like(maximum)
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    for keys, scores in score_tiles(query, key, mask, rows):
        previous, maximum = maximum, torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))  # (B,H,t,1)
        rescale = (previous - maximum).exp_()  # what was summed under the previous maximum
        exponentials = exp_(scores.sub_(maximum))
        total = total.mul_(rescale).add_(exponentials.sum(dim=-1, keepdim=True))  # (B,H,t,1)
        if drop is not None:  # only now: the sum above is of all weights, dropped or not
            exponentials.mul_(drop.factor(exponentials, rows, keys))
        output.mul_(rescale)
        output.flatten(0, 1).baddbmm_(exponentials.flatten(0, 1), value[..., keys, :].flatten(0, 1))  # += (B,H,t,V)
    total = total.clamp_(min=torch.finfo(total.dtype).tiny)  # 0 for a query that sees no key: 0 / tiny is 0
    return output.div_(total), maximum.add_(total.log())


def score_tiles(query: Tensor, key: Tensor, mask: BoundMask, rows: slice) -> Iterator[tuple[slice, Tensor]]:
    """Each tile of keys that some query of `rows` sees, with its scores (B, H, t, s), -inf where hidden.

    All tiles are written into the same memory, one after the other: a new allocation would have to be mapped again.
    """
    scratch = query.new_empty(query[..., 0].numel() * TILE)
    for keys in tiles(key.shape[-2]):
        share = share_visible(mask, rows, keys)
        if share == 0:
            continue
        shape = (*query.shape[:-1], keys.stop - keys.start)
        scores = scratch[: math.prod(shape)].view(shape)
        tile = key[..., keys, :].transpose(-2, -1)  # (B,H,s,K) -> (B,H,K,s)
        torch.bmm(query.flatten(0, 1), tile.flatten(0, 1), out=scores.flatten(0, 1))  # (B*H,t,K) @ (B*H,K,s)
        scores = mask.adjust(scores, queries=rows, keys=keys)
        if share < 1:
            visible = mask.tile(rows, keys)
            assert visible is not None
            scores.masked_fill_(~visible, -torch.inf)
        yield keys, scores


def before_change(grad: Tensor, pair: tuple[Tensor, Tensor], mask: BoundMask, rows: slice, keys: slice) -> Tensor:
    """The gradient (B, H, t, s) of changed scores as that of query @ key, which is multiplied once more for it.

    A change that only adds leaves the gradient as it is, and never comes here.
    """
    query, key = pair
    rate = mask.derivative(query @ key[..., keys, :].transpose(-2, -1), queries=rows, keys=keys)
    return grad if rate is None else grad.mul_(rate)


def share_visible(mask: BoundMask, rows: slice, keys: slice) -> float:
    """The share of a tile that is visible, 0 to 1; kept for each mask, since most tiles are all or none."""
    shares: dict[tuple[int, ...], float] = mask.keep("shares", dict)
    place = (rows.start, rows.stop, keys.start, keys.stop)
    if place not in shares:
        visible = mask.tile(rows, keys)
        shares[place] = 1.0 if visible is None else float(visible.count_nonzero()) / visible.numel()
    return shares[place]


def exp_(exponents: Tensor) -> Tensor:
    """Exponentials in place, as powers of 2: on the CPU PyTorch's `exp2` takes a third of the time of its `exp`."""
    return exponents.mul_(math.log2(math.e)).exp2_()


def tiles(length: int) -> Iterator[slice]:
    """0..length in slices of TILE, the last one shorter where it must be."""
    return (slice(start, min(start + TILE, length)) for start in range(0, length, TILE))


def executed_flops(workload: Workload) -> int:
    """All pairs of each tile in which any is visible; the backward pass makes the scores again."""
    sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
    mask = BoundMask(workload.mask_rule, sizes, "cpu", num_heads=workload.num_heads)
    pairs = 0
    for rows in tiles(workload.seq_len):
        for keys in tiles(workload.kv_len):
            visible = mask.tile(rows, keys)
            if visible is None or visible.any():
                pairs += workload.batch_size * (rows.stop - rows.start) * (keys.stop - keys.start)
    bends_back = workload.direction in {"backward", "forward_backward"} and not workload.mask_rule.is_additive
    bent = 2 * workload.num_heads * pairs * workload.head_dim  # `before_change` makes the scores once more
    return product_flops(workload, pairs, recomputes_scores=True) + bends_back * bent


IMPLEMENTATION = Implementation(
    build=Chunked,
    source="https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2112.05682",
    executed_flops=executed_flops,
    has_dropout=True,
    features=("scale", "sinks"),
)
