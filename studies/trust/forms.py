"""Honest attention in unusual forms, each a function or a class that `attnbench check FILE:NAME` takes.

Query (B, H, T, K), key (B, H, S, K), value (B, H, S, V), mask None or boolean, True where a key is visible; the result
is (B, H, T, V), and a query that sees no key gives 0. Half precision is summed in float32 where sums are explicit, as
in fused kernels. None of these forms may ever be rejected.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own convention
from torch.utils.checkpoint import checkpoint

LOG2E = math.log2(math.e)
TILE = 23


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert narrower tensors to float32."""
    return tuple(tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor for tensor in tensors)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """(B, H, T, K), (B, H, S, K) -> (B, H, T, S)."""
    return query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])


def _hidden(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with -inf at hidden keys."""
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Weights, 0 at hidden keys."""
    weights = _hidden(scores, mask).softmax(dim=-1)
    return weights if mask is None else weights.masked_fill(~mask, 0.0)


def _maximum(scores: Tensor) -> Tensor:
    """Return the largest score of each row, 0 for rows that see nothing; (..., 1)."""
    largest = scores.amax(dim=-1, keepdim=True).detach()
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _full(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Expand the mask to (B, H, T, S); None becomes all True."""
    shape = (*query.shape[:-1], key.shape[-2])
    return query.new_ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)


def _over(total: Tensor, summed: Tensor) -> Tensor:
    """Divide, with 0 if nothing was summed."""
    return total / summed.masked_fill(summed == 0.0, 1.0)


def textbook(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Scores, softmax, product."""
    return _softmax(_scores(query, key), mask) @ value


def nan_to_num(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """NaN of rows that see nothing becomes 0, by the usual idiom."""
    return _hidden(_scores(query, key), mask).softmax(dim=-1).nan_to_num(0.0) @ value


def finite_minimum(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Hidden scores are the smallest finite number, and rows that see nothing are zeroed."""
    scores = _scores(query, key)
    if mask is None:
        return scores.softmax(dim=-1) @ value
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return (weights * mask.any(dim=-1, keepdim=True)) @ value


def mask_as_bias(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The mask is added as 0 and half of the smallest number."""
    scores = _scores(query, key)
    if mask is None:
        return scores.softmax(dim=-1) @ value
    bias = torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, torch.finfo(scores.dtype).min / 2)
    return (scores + bias).softmax(dim=-1).masked_fill(~mask, 0.0) @ value


def mask_as_logarithm(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The logarithm of the mask as numbers is added; a query that sees nothing sees all, and gets 0 in the end."""
    scores = _scores(query, key)
    if mask is None:
        return scores.softmax(dim=-1) @ value
    some = mask.any(dim=-1, keepdim=True)
    return ((scores + (mask | ~some).to(scores.dtype).log()).softmax(dim=-1) @ value) * some


def mask_times_exponential(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Exponentials are multiplied by the mask, and divided by their sum."""
    wide, scores = _wide(value)[0], _wide(_scores(query, key))[0]
    parts = (scores - _maximum(_hidden(scores, mask))).clamp(max=0.0).exp()
    parts = parts if mask is None else parts * mask
    return _over(parts @ wide, parts.sum(dim=-1, keepdim=True)).to(value.dtype)


def exponent_of_two(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Powers of 2 of scores times log2(e), as in fused kernels."""
    wide_query, wide_key, wide_value = _wide(query, key, value)
    scores = _hidden((wide_query * (LOG2E / query.shape[-1] ** 0.5)) @ wide_key.mT, mask)
    parts = torch.exp2(scores - _maximum(scores))
    return _over(parts @ wide_value, parts.sum(dim=-1, keepdim=True)).to(value.dtype)


def logsumexp(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Exponentials of scores less their logsumexp."""
    scores = _hidden(_scores(query, key), mask)
    weights = (scores - scores.logsumexp(dim=-1, keepdim=True)).exp()
    return (weights if mask is None else weights.masked_fill(~mask, 0.0)) @ value


def softmin(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The softmin of negated scores."""
    weights = F.softmin(-_hidden(_scores(query, key), mask), dim=-1)
    return (weights if mask is None else weights.masked_fill(~mask, 0.0)) @ value


def _tiles(key: Tensor, value: Tensor, mask: Tensor, tile: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and mask by tiles of keys."""
    for start in range(0, key.shape[-2], tile):
        here = slice(start, start + tile)
        yield key[..., here, :], value[..., here, :], mask[..., here]


def online(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, tile: int = TILE) -> Tensor:
    """Online softmax over tiles of 23 keys, with a running maximum."""
    wide_query, wide_key, wide_value = _wide(query, key, value)
    largest = wide_query.new_full((*query.shape[:-1], 1), -torch.inf)
    total, summed = wide_query.new_zeros((*query.shape[:-1], value.shape[-1])), torch.zeros_like(largest)
    for keys, values, seen in _tiles(wide_key, wide_value, _full(mask, query, key), tile):
        scores = _scores(wide_query, keys).masked_fill(~seen, -torch.inf)
        now = torch.maximum(largest, scores.amax(dim=-1, keepdim=True).detach())
        base = now.masked_fill(now == -torch.inf, 0.0)
        parts, rescale = (scores - base).exp(), (largest - base).exp()
        total, summed = total * rescale + parts @ values, summed * rescale + parts.sum(dim=-1, keepdim=True)
        largest = now
    return _over(total, summed).to(value.dtype)


def two_passes(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The maximum over all tiles first, then the sums."""
    wide_query, wide_key, wide_value = _wide(query, key, value)
    tiles = list(_tiles(wide_key, wide_value, _full(mask, query, key), TILE))
    scores = [_scores(wide_query, keys).masked_fill(~seen, -torch.inf) for keys, _, seen in tiles]
    base = _maximum(torch.cat(scores, dim=-1))
    parts = [(each - base).exp() for each in scores]
    total = torch.stack([part @ values for part, (_, values, _) in zip(parts, tiles, strict=True)]).sum(dim=0)
    summed = torch.stack([part.sum(dim=-1, keepdim=True) for part in parts]).sum(dim=0)
    return _over(total, summed).to(value.dtype)


def split_keys(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Split-K: each third of the keys alone, joined by their logsumexp."""
    wide_query, wide_key, wide_value = _wide(query, key, value)
    outputs, logs = [], []
    for keys, values, seen in _tiles(wide_key, wide_value, _full(mask, query, key), -(-key.shape[-2] // 3)):
        scores = _scores(wide_query, keys).masked_fill(~seen, -torch.inf)
        outputs.append(_softmax(scores, seen) @ values)
        logs.append(scores.logsumexp(dim=-1, keepdim=True))
    shares = torch.stack(logs).softmax(dim=0)
    shares = shares.masked_fill(shares.isnan() & ~_full(mask, query, key).any(dim=-1, keepdim=True), 0.0)
    return (shares * torch.stack(outputs)).sum(dim=0).to(value.dtype)


def kahan(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Kahan summation over tiles of values."""
    wide = _wide(value)[0]
    weights = _softmax(_wide(_scores(query, key))[0], mask)
    total = wide.new_zeros((*query.shape[:-1], value.shape[-1]))
    lost = torch.zeros_like(total)
    for start in range(0, key.shape[-2], TILE):
        here = slice(start, start + TILE)
        term = weights[..., here] @ wide[..., here, :] - lost
        after = total + term
        lost, total = (after - total) - term, after
    return total.to(value.dtype)


def key_by_key(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Weighted values summed in the order of a cumulative sum, 16 keys at a time."""
    weights = _softmax(_wide(_scores(query, key))[0], mask)
    parts = zip(weights.split(16, dim=-1), _wide(value)[0].split(16, dim=-2), strict=True)
    sums = [(part.unsqueeze(-1) * values.unsqueeze(-3)).cumsum(dim=-2)[..., -1, :] for part, values in parts]
    return torch.stack(sums).sum(dim=0).to(value.dtype)


def vmapped_over_queries(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """One query, mapped over queries by torch.func."""

    def one(query: Tensor, seen: Tensor) -> Tensor:  # (B, H, K), (B, H, S) -> (B, H, V)
        scores = (key @ query.unsqueeze(-1)).squeeze(-1) / query.shape[-1] ** 0.5
        return (_softmax(scores, seen).unsqueeze(-2) @ value).squeeze(-2)

    result: Tensor = torch.func.vmap(one, in_dims=2, out_dims=2)(query, _full(mask, query, key))
    return result


class _Recomputed(torch.autograd.Function):
    """Stores only the inputs, and repeats the forward pass in the backward pass."""

    @staticmethod
    def forward(ctx, query, key, value, mask):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205 - as in PyTorch's examples
        ctx.save_for_backward(query, key, value)
        ctx.mask = mask
        return _softmax(_scores(query, key), mask) @ value

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205 - likewise
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            made = torch.autograd.grad(textbook(*leaves, mask=ctx.mask), leaves, grad)
        return *made, None


def recomputed_backward(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """A custom function that recomputes everything in its backward pass."""
    result: Tensor = _Recomputed.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
    return result


class _Written(torch.autograd.Function):
    """Both passes by hand, from the logsumexp of each row, as in FlashAttention-2."""

    @staticmethod
    def forward(ctx, query, key, value, mask):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205 - as in PyTorch's examples
        wide = _wide(query, key, value)
        scores = _hidden(_scores(wide[0], wide[1]), mask)
        logs = scores.logsumexp(dim=-1, keepdim=True)
        logs = logs.masked_fill(logs == -torch.inf, 0.0)
        output = (scores - logs).exp() @ wide[2]
        ctx.save_for_backward(query, key, value, output, logs)
        ctx.mask = mask
        return output.to(value.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205 - likewise
        query, key, value, output, logs = ctx.saved_tensors
        wide_query, wide_key, wide_value, wide_grad = _wide(query, key, value, grad)
        weights = (_hidden(_scores(wide_query, wide_key), ctx.mask) - logs).exp()
        grad_weights = wide_grad @ wide_value.mT
        grad_scores = weights * (grad_weights - (wide_grad * output).sum(dim=-1, keepdim=True))
        grad_scores = grad_scores / query.shape[-1] ** 0.5
        made = grad_scores @ wide_key, grad_scores.mT @ wide_query, weights.mT @ wide_grad
        return *(each.to(query.dtype) for each in made), None


def written_backward(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Both passes written by hand."""
    result: Tensor = _Written.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
    return result


def checkpointed(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """torch.utils.checkpoint around the textbook form."""
    result: Tensor = checkpoint(lambda *given: textbook(*given, mask=mask), query, key, value, use_reentrant=False)
    return result


def padded_length(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Queries and keys padded to a multiple of 32, and the result sliced."""
    more_queries, more_keys = -query.shape[-2] % 32, -key.shape[-2] % 32
    seen = F.pad(_full(mask, query, key), (0, more_keys, 0, more_queries))
    padded = F.pad(query, (0, 0, 0, more_queries)), F.pad(key, (0, 0, 0, more_keys)), F.pad(value, (0, 0, 0, more_keys))
    return textbook(*padded, mask=seen)[..., : query.shape[-2], :]


def padded_width(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Heads padded to 64 columns of zeros, with the scale of their own width."""
    more = max(0, 64 - query.shape[-1])
    scores = F.pad(query, (0, more)) @ F.pad(key, (0, more)).mT / query.shape[-1] ** 0.5
    return (_softmax(scores, mask) @ F.pad(value, (0, 5)))[..., : value.shape[-1]]


def extra_key(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """A hidden key before the first one, as if a sink were off."""
    seen = F.pad(_full(mask, query, key), (1, 0))
    return textbook(query, F.pad(key, (0, 0, 1, 0)), F.pad(value, (0, 0, 1, 0)), mask=seen)


def permuted_memory(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Computes with tokens before heads, as (B, T, H, K), and permutes the result."""
    moved = [tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)]
    scores = torch.einsum("bthk,bshk->bhts", moved[0], moved[1]) / query.shape[-1] ** 0.5
    return torch.einsum("bhts,bshv->bthv", _softmax(scores, mask), moved[2]).transpose(1, 2)


def transposed_result(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Returns a view of (B, H, V, T)."""
    return (value.mT @ _softmax(_scores(query, key), mask).mT).mT


def keys_before_queries(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Scores as (B, H, S, T), with the softmax over the last axis but one."""
    scores = key @ query.mT / math.sqrt(query.shape[-1])
    if mask is None:
        return scores.softmax(dim=-2).mT @ value
    weights = scores.masked_fill(~mask.mT, -torch.inf).softmax(dim=-2)
    return weights.masked_fill(~mask.mT, 0.0).mT @ value


def float64_inside(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Computes in float64."""
    return textbook(query.double(), key.double(), value.double(), mask=mask).to(value.dtype)


def float32_inside(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Computes half precision in float32."""
    wide_query, wide_key, wide_value = _wide(query, key, value)
    return textbook(wide_query, wide_key, wide_value, mask=mask).to(value.dtype)


def smoothed_keys(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The mean key is subtracted from all keys, which moves all scores of a query alike, as in SageAttention."""
    wide_query, wide_key, wide_value = _wide(query, key, value)
    return textbook(wide_query, wide_key - wide_key.mean(dim=-2, keepdim=True), wide_value, mask=mask).to(value.dtype)


def centred_values(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The mean value is subtracted, and added to the result of each query that sees a key."""
    wide_query, wide_key, wide_value = _wide(query, key, value)
    mean = wide_value.mean(dim=-2, keepdim=True)
    moved = textbook(wide_query, wide_key, wide_value - mean, mask=mask)
    return (moved + mean * _full(mask, query, key).any(dim=-1, keepdim=True)).to(value.dtype)


def einsum_with_ellipsis(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Einsum with an ellipsis, operands exchanged."""
    scores = torch.einsum("...sk,...tk->...ts", key, query) / math.sqrt(query.shape[-1])
    return torch.einsum("...sv,...ts->...tv", value, _softmax(scores, mask))


def batched_products(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Batch and heads as one axis of baddbmm, whose added matrix is the mask's bias."""
    hidden = ~_full(mask, query, key)
    bias = (
        torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min / 2).flatten(0, 1)
    )
    scores = torch.baddbmm(bias, query.flatten(0, 1), key.flatten(0, 1).mT, alpha=query.shape[-1] ** -0.5)
    weights = scores.softmax(dim=-1).masked_fill(hidden.flatten(0, 1), 0.0)
    return torch.bmm(weights, value.flatten(0, 1)).reshape(*query.shape[:-1], value.shape[-1])


def products_without_matmul(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Products by multiplication and sums over one axis."""
    wide_query, wide_key, wide_value = _wide(query, key, value)
    scores = (wide_query.unsqueeze(-2) * wide_key.unsqueeze(-3)).sum(dim=-1) / query.shape[-1] ** 0.5
    weights = _softmax(scores, mask)
    return (weights.unsqueeze(-1) * wide_value.unsqueeze(-3)).sum(dim=-2).to(value.dtype)


def by_heads(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """One head after another."""
    seen = _full(mask, query, key)
    heads = range(query.shape[1])
    return torch.stack([textbook(query[:, h], key[:, h], value[:, h], mask=seen[:, h]) for h in heads], dim=1)


def by_values(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Weights of all keys, and the values of 19 at a time."""
    weights = _softmax(_wide(_scores(query, key))[0], mask)
    total = query.new_zeros((), dtype=weights.dtype)
    for part, values in zip(weights.split(19, dim=-1), _wide(value)[0].split(19, dim=-2), strict=True):
        total = total + part @ values
    return total.to(value.dtype)


def visible_prefix(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """17 queries at a time, with the keys up to the last one that any of them sees."""
    if mask is None:
        return textbook(query, key, value)
    parts = []
    for part, seen in zip(query.split(17, dim=-2), _full(mask, query, key).split(17, dim=-2), strict=True):
        some = seen.flatten(0, 2).any(dim=0).nonzero()
        end = int(some.max()) + 1 if some.numel() else 1
        parts.append(textbook(part, key[..., :end, :], value[..., :end, :], mask=seen[..., :end]))
    return torch.cat(parts, dim=-2)


def scaled_query(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The scale is in the queries."""
    return _softmax((query * query.shape[-1] ** -0.5) @ key.mT, mask) @ value


def sdpa_with_bias(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """PyTorch's own attention with the mask as a bias."""
    bias = None if mask is None else torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


_WORKSPACES: dict[tuple[object, ...], Tensor] = {}


def workspace(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Scores in memory that is reused between calls and overwritten in each."""
    if torch.is_grad_enabled():
        return textbook(query, key, value, mask=mask)
    shape = (*query.shape[:-1], key.shape[-2])
    scores = _WORKSPACES.setdefault((shape, query.dtype), torch.empty(shape, dtype=query.dtype))
    torch.matmul(query, key.mT, out=scores).div_(query.shape[-1] ** 0.5)
    if mask is None:
        return scores.softmax(dim=-1) @ value
    return scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1).masked_fill_(~mask, 0.0) @ value


def in_place(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Scores are scaled and masked in place."""
    scores = (query @ key.mT).mul_(query.shape[-1] ** -0.5)
    if mask is None:
        return scores.softmax(dim=-1) @ value
    return scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1).masked_fill(~mask, 0.0) @ value


def filled_result(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The result is made empty and filled by slices."""
    result = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=value.dtype)
    seen = _full(mask, query, key)
    for start in range(0, query.shape[-2], 40):
        rows = slice(start, start + 40)
        result[..., rows, :] = textbook(query[..., rows, :], key, value, mask=seen[..., rows, :])
    return result


def complex_products(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Pairs of columns as complex numbers: the real part of a product with the conjugate is the score."""
    wide_query, wide_key, wide_value = _wide(query, key, value)
    pairs = [torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) for each in (wide_query, wide_key)]
    scores = (pairs[0] @ pairs[1].mH).real / query.shape[-1] ** 0.5
    return (_softmax(scores, mask) @ wide_value).to(value.dtype)


def shuffled_keys(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Keys and values in an order drawn by a generator of its own."""
    order = torch.randperm(key.shape[-2], generator=torch.Generator().manual_seed(1))
    hidden = None if mask is None else _full(mask, query, key)[..., order]
    return textbook(query, key[..., order, :], value[..., order, :], mask=hidden)


def functional_module(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The softmax is a module that torch.func.functional_call calls."""
    weights: Tensor = torch.func.functional_call(nn.Softmax(dim=-1), {}, (_hidden(_scores(query, key), mask),))
    return (weights if mask is None else weights.masked_fill(~mask, 0.0)) @ value


def with_dropout(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Drops weights with the given probability."""
    return F.dropout(_softmax(_scores(query, key), mask), dropout) @ value


class Attends:
    """A plain class with `attend`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute attention in the textbook form."""
        return textbook(query, key, value, mask=mask)


class AttendsByModule(nn.Module):
    """A module with layers of its own, and `attend`."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute attention in the textbook form."""
        weights: Tensor = self.softmax(_hidden(_scores(query, key), mask))
        return (weights if mask is None else weights.masked_fill(~mask, 0.0)) @ value


NAMES = tuple(
    name
    for name, value in list(globals().items())
    if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == __name__
)
"""Every form."""
COMPILED = ("textbook", "nan_to_num", "exponent_of_two", "online", "smoothed_keys", "einsum_with_ellipsis")
"""Forms that are also tried with torch.compile."""
