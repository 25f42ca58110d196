"""The formula of attention in float64, with which tests compare implementations.

It shares no code with the package's own oracle. Shapes: B batch rows, T queries, S keys, H heads, G key/value heads, K
head width, V value width, D embedding width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.contract import Weights, Workload
from attnbench.workloads.masks import parse_mask


def alibi_slopes(num_heads: int) -> Tensor:
    """Compute the slopes (H,) of ALiBi as the program of its paper does, https://arxiv.org/abs/2108.12409.

    For a power of two they are a geometric row. Otherwise the row of the next lower power is filled up with every other
    slope of the next higher power.
    """
    if num_heads & (num_heads - 1) == 0:
        start = 2.0 ** (-8 / num_heads)
        return torch.tensor([start ** (head + 1) for head in range(num_heads)], dtype=torch.float64)
    whole = 1 << (num_heads.bit_length() - 1)
    return torch.cat([alibi_slopes(whole), alibi_slopes(2 * whole)[0::2][: num_heads - whole]])


def bucket(ahead: int, buckets: int, farthest: int, *, is_two_sided: bool) -> int:
    """Return the bucket of the relative position `ahead`, as the package transformers does for T5."""
    start = 0
    if is_two_sided:
        buckets //= 2
        start, distance = (buckets if ahead > 0 else 0), abs(ahead)
    else:
        distance = max(0, -ahead)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    power = math.log(distance / exact) / math.log(farthest / exact)
    return start + min(buckets - 1, exact + int(power * (buckets - exact) + 1e-9))


def learned_bias(part: str, point: Workload, operands: dict[str, Tensor]) -> Tensor:
    """Compute the bias (H, T, S) of a learned mask, pair by pair."""
    query_len, key_len = point.seq_len, point.kv_len
    is_two_sided = not part.startswith("relative_buckets_past")
    offset = 0 if is_two_sided else key_len - query_len
    (table,) = (tensor for name, tensor in operands.items() if name.startswith("relative_bias"))
    sizes = tuple(map(int, part.partition("(")[2].rstrip(")").split(",")))
    buckets = [
        [bucket(j - i - offset, *sizes, is_two_sided=is_two_sided) for j in range(key_len)] for i in range(query_len)
    ]
    return table[:, torch.tensor(buckets)]


def changed_scores(scores: Tensor, point: Workload, operands: dict[str, Tensor]) -> Tensor:
    """Apply the parts of the mask to scores (B, H, T, S) in order; a part that is not known here uses its own rule."""
    query, key = torch.arange(point.seq_len)[:, None], torch.arange(point.kv_len)
    offset = point.kv_len - point.seq_len
    slopes = alibi_slopes(point.num_heads)[:, None, None]
    for part in point.mask.split("+"):
        mask = parse_mask(part)
        if part == "alibi":
            scores = scores - slopes * (query - key).abs()
        elif part == "alibi_bottom_right":
            scores = scores - slopes * (query + offset - key).abs()
        elif part.startswith("softcap"):
            limit = float(part.removeprefix("softcap(").removesuffix(")"))
            scores = limit * torch.tanh(scores / limit)
        elif mask.is_learned:
            scores = scores + learned_bias(part, point, operands)
        elif mask.changes_scores:  # an additive mask of drawn numbers: its own tests define it
            head = torch.from_numpy(mask.per_head(point.num_heads))[:, None, None]
            scores = scores + mask.bias(head, query, key, offset) if mask.is_additive else mask.transform(scores)
    return scores


def attention(query: Tensor, key: Tensor, value: Tensor, point: Workload, operands: dict[str, Tensor]) -> Tensor:
    """Compute softmax(scale * query @ key.mT) @ value (B, H, T, V); a query that sees no key gets zeros."""
    group = torch.arange(point.num_heads) // (point.num_heads // point.num_kv_heads)
    scores = torch.einsum("bhtk,bhsk->bhts", query, key[:, group]) * point.score_scale
    visible = torch.from_numpy(point.mask_rule.dense(point.batch_size, point.seq_len, point.kv_len).copy())[:, None]
    powers = changed_scores(scores, point, operands).exp() * visible
    total = powers.sum(-1, keepdim=True)
    if "sinks" in operands:
        total = total + operands["sinks"].exp()[:, None, None]
    return torch.einsum("bhts,bhsv->bhtv", powers / total.where(total > 0, 1.0), value[:, group])


def module(x: Tensor, context: Tensor, weights: Weights, point: Workload, operands: dict[str, Tensor]) -> Tensor:
    """Project x (B, T, D) and context (B, S, D), attend, and apply the output projection if there is one."""
    heads = {}
    for name, tokens in (("query", x), ("key", context), ("value", context)):
        bias = getattr(weights, f"{name}_bias")
        projected = torch.einsum("btd,hkd->bhtk", tokens, getattr(weights, name))
        heads[name] = projected if bias is None else projected + bias[:, None]
    merged = attention(**heads, point=point, operands=operands).transpose(1, 2).flatten(2)  # (B,H,T,V) -> (B,T,H*V)
    if weights.out is None:
        return merged
    projected = merged @ weights.out.T
    return projected if weights.out_bias is None else projected + weights.out_bias


@dataclass(frozen=True)
class Draw:
    """Inputs of one call of one workload, in float64."""

    point: Workload
    tensors: dict[str, Tensor]  # query, key and value, or x and context
    operands: dict[str, Tensor]
    weights: Weights

    @property
    def leaves(self) -> list[Tensor]:
        """Return all tensors that need gradients; the weights are among them in scope `module`."""
        weights = self.weights.tensors().values() if self.point.scope == "module" else ()
        return [*self.tensors.values(), *self.operands.values(), *weights]

    def expected(self) -> Tensor:
        if self.point.scope == "module":
            return module(**self.tensors, weights=self.weights, point=self.point, operands=self.operands)
        return attention(**self.tensors, point=self.point, operands=self.operands)


def draw(point: Workload, seed: int = 0) -> Draw:
    """Draw standard normal numbers; weights have variance 1 / fan-in."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, factor: float = 1.0) -> Tensor:
        return (factor * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()

    batch, width = point.batch_size, point.embed_dim
    if point.scope == "module":
        tensors = {"x": normal(batch, point.seq_len, width), "context": normal(batch, point.kv_len, width)}
    else:
        tensors = {
            "query": normal(batch, point.num_heads, point.seq_len, point.head_dim),
            "key": normal(batch, point.num_kv_heads, point.kv_len, point.head_dim),
            "value": normal(batch, point.num_kv_heads, point.kv_len, point.value_dim),
        }
    operands = {name: normal(*shape) for name, shape in point.operands.items()}
    shapes = Weights.shapes(point, width)
    weights = {name: normal(*shape, factor=max(shape[1:], default=1) ** -0.5) for name, shape in shapes.items()}
    return Draw(point, tensors, operands, Weights(**weights).biased(point.biased))
