"""Layouts: where a module keeps the canonical weights, told by differentiable steps (docs/adr/0006).

A name stands for the linear layer's NAME.weight and NAME.bias; one with {} in it is completed there, as in
`in_proj_{}`. Where the canonical weights have no biases, no layout makes any.

Shapes: H heads, G key/value heads, K head width, V value width, D embedding width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.contract import Weights

LETTERS = "qkv"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a module keeps the canonical weights.

    `pack` makes the state dict by differentiable steps only. Without `has_out` the module stops before the output
    projection, (B, T, H*V), and the adapter adds one, so that it is asked the same question as all others.
    """

    pack: Callable[[Weights], dict[str, Tensor]]
    has_out: bool = True


def split(query: str, key: str, value: str, *, out: str | None) -> Layout:
    """A linear layer each for query (H*K, D), key (G*K, D) and value (G*V, D), head after head; out (D, H*V)."""
    return stacked({query: "q", key: "k", value: "v"}, out=out)


def packed(name: str, order: str = LETTERS, *, out: str | None) -> Layout:
    """One linear layer with all rows of the first, of the second, then of the third; `order` as in "qkv" or "kqv".

    Raises:
        ValueError: `order` does not name q, k and v once each.
    """
    return stacked({name: order}, out=out)


def stacked(parts: Mapping[str, str], *, out: str | None) -> Layout:
    """Linear layers by name, each with the rows of those its letters name, as in {"to_q": "q", "to_kv": "kv"}.

    Raises:
        ValueError: the letters do not name q, k and v once each.
    """
    _check_letters("".join(parts.values()))

    def pack(weights: Weights) -> dict[str, Tensor]:
        state = out_state(weights, out)
        for name, order in parts.items():
            rows = _rows(weights)
            state |= linear(
                name,
                torch.cat([rows[letter][0].flatten(0, 1) for letter in order]),  # (H,K,D) -> (H*K,D), one below another
                [bias.flatten() for letter in order if (bias := rows[letter][1]) is not None],
            )
        return state

    return Layout(pack=pack, has_out=out is not None)


def per_head(name: str, order: str = LETTERS, *, out: str | None) -> Layout:
    """One linear layer that has, for each key/value head, the rows of its queries, key and value together.

    As a module has it that views its projection as (B, T, H, 3*K) before it takes it apart. Where G < H, each group's
    rows begin with those of all its query heads, as in Falcon (https://arxiv.org/abs/2311.16867).

    Raises:
        ValueError: `order` does not name q, k and v once each.
    """
    _check_letters(order)

    def pack(weights: Weights) -> dict[str, Tensor]:
        groups = len(weights.key)
        rows = {
            letter: (
                weight.unflatten(0, (groups, -1)).flatten(1, 2),  # (H,K,D) -> (G,H/G*K,D)
                None if bias is None else bias.reshape(groups, -1),  # (H,K) -> (G,H/G*K)
            )
            for letter, (weight, bias) in _rows(weights).items()
        }
        biases = [bias for letter in order if (bias := rows[letter][1]) is not None]
        weight = torch.cat([rows[letter][0] for letter in order], dim=1).flatten(0, 1)  # -> (H*K+G*K+G*V,D)
        together = [torch.cat(biases, dim=1).flatten()] if biases else []
        return out_state(weights, out) | linear(name, weight, together)

    return Layout(pack=pack, has_out=out is not None)


def head_list(prefix: str, *, query: str, key: str, value: str, out: str | None) -> Layout:
    """A module for each head, at `prefix` with {head} for its number, that holds the linear layers query, key, value.

    Raises:
        ValueError: `prefix` does not say where the head's number stands.
    """
    if "{head}" not in prefix:
        raise ValueError(f"prefix={prefix} is not allowed: it needs {{head}} where the number of the head stands")

    def pack(weights: Weights) -> dict[str, Tensor]:
        state = out_state(weights, out)
        for name, (weight, bias) in zip((query, key, value), _rows(weights).values(), strict=True):
            for head in range(len(weight)):
                path = f"{prefix.replace('{head}', str(head))}.{name}"
                state |= linear(path, weight[head], [] if bias is None else [bias[head]])  # (K,D), (K,)
        return state

    return Layout(pack=pack, has_out=out is not None)


def transposed(layout: Layout) -> Layout:
    """The same with each weight (D, rows) instead of (rows, D), for x @ weight, as in the Conv1D of GPT-2."""

    def pack(weights: Weights) -> dict[str, Tensor]:
        return {name: tensor.T if tensor.dim() > 1 else tensor for name, tensor in layout.pack(weights).items()}

    return Layout(pack=pack, has_out=layout.has_out)


def _rows(weights: Weights) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Weight (H, K, D) and bias (H, K) of query, key and value by letter, in this order."""
    return {
        "q": (weights.query, weights.query_bias),
        "k": (weights.key, weights.key_bias),
        "v": (weights.value, weights.value_bias),
    }


def linear(name: str, weight: Tensor, biases: list[Tensor]) -> dict[str, Tensor]:
    """The two entries of a linear layer, or one without biases; the biases (rows,) are put one after the other."""
    path = name if "{}" in name else f"{name}.{{}}"
    entries = {path.replace("{}", "weight"): weight}
    return entries | ({path.replace("{}", "bias"): torch.cat(biases)} if biases else {})


def out_state(weights: Weights, name: str | None) -> dict[str, Tensor]:
    """The entries of the output projection (D, H*V), (D,); empty where there is none."""
    if name is None or weights.out is None:
        return {}
    return linear(name, weights.out, [] if weights.out_bias is None else [weights.out_bias])


def _check_letters(order: str) -> None:
    if sorted(order) != sorted(LETTERS):
        raise ValueError(f"order={order} is not allowed: it names q, k and v once each, as in qkv or kqv")
