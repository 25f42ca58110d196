"""Layouts: where a module keeps the canonical weights.

A layout turns the canonical weights into the module's state dict by differentiable steps only, because the check sends
gradients back through it (docs/adr/0006). In a layout, a name stands for the linear layer's NAME.weight and NAME.bias;
a name with {} is completed there, as in `in_proj_{}`. If the canonical weights have no biases, no layout creates any.
Shapes as in the contract.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.contract import Weights, linear, out_state
from attnbench.contract.declared import kind
from attnbench.contract.functions import words

LETTERS = "qkv"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The place of the canonical weights in a module.

    `pack` creates the state dict by differentiable steps only. Without `has_out` the module ends before the output
    projection, at (B, T, H*V), and the adapter adds a projection so that the output is (B, T, D). Messages call the
    layout by its `text`.
    """

    pack: Callable[[Weights], dict[str, Tensor]]
    has_out: bool = True
    text: str = "Layout(pack=...)"

    def __post_init__(self) -> None:
        if not callable(self.pack):
            raise ValueError(f"{self.text} is not allowed: pack is {kind(self.pack)}, and must be f(weights) -> dict")

    def state(self, weights: Weights) -> dict[str, Tensor]:
        """Call `pack` with the weights.

        Raises:
            ValueError: it raises, or returns anything but tensors by name.
        """
        names, there = [f"{name}_bias" for name in ("query", "key", "value", "out")], weights.tensors()
        absent = [name for name in names if name not in there]
        without = f" of weights without {', '.join(absent)}" if absent else ""
        try:
            state: object = self.pack(weights)  # a user's function may return anything
        except Exception as error:
            hint = "; where a bias is None, leave its entry out" if absent else ""
            raise ValueError(f"{self.text} fails to pack a state dict{without}: {words(error)}{hint}") from error
        if not isinstance(state, Mapping):
            raise ValueError(f"{self.text} makes {kind(state)}{without}: it must make tensors by parameter name")
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                or_none = ", or leave the entry out" if tensor is None else ""
                raise ValueError(f"{self.text} makes {kind(tensor)} of {name}{without}: it must make a tensor{or_none}")
        return dict(state)


def split(query: str, key: str, value: str, *, out: str | None) -> Layout:
    """One linear layer each for query (H*K, D), key (G*K, D) and value (G*V, D), head after head; out (D, H*V).

    Raises:
        ValueError: the names are not three different strings.
    """
    text = _text("split", query, key, value, out=out)
    _check(text, out, query=query, key=key, value=value)
    return _stacked({query: "q", key: "k", value: "v"}, out, text)


def packed(name: str, order: str = LETTERS, *, out: str | None) -> Layout:
    """One linear layer with all rows of the first, of the second, then of the third; `order` as in "qkv" or "kqv".

    Raises:
        ValueError: `order` does not name q, k and v once each, or a name is not a string.
    """
    text = _text("packed", name, order=order, out=out)
    _check(text, out, order, name=name)
    return _stacked({name: order}, out, text)


def stacked(parts: Mapping[str, str], *, out: str | None) -> Layout:
    """Linear layers by name, each with the rows that its letters name, as in {"to_q": "q", "to_kv": "kv"}.

    Raises:
        ValueError: the letters do not name q, k and v once each, or a name is not a string.
    """
    text = _text("stacked", parts, out=out)
    if not isinstance(parts, Mapping):
        raise ValueError(f'{text} is not allowed: it takes letters by layer, as in {{"to_q": "q", "to_kv": "kv"}}')
    for name in parts:
        _check(text, out, "".join(map(str, parts.values())), name=name)
    return _stacked(parts, out, text)


def _stacked(parts: Mapping[str, str], out: str | None, text: str) -> Layout:
    """`stacked` with checked names and letters; `text` is the call in the user's file."""

    def pack(weights: Weights) -> dict[str, Tensor]:
        state = out_state(weights, out)
        for name, order in parts.items():
            rows, biases = _layer(weights, order)
            weight = torch.cat([each.flatten(0, 1) for each in rows])  # (H,K,D) -> (H*K,D), one below another
            state |= linear(name, weight, torch.cat([bias.flatten() for bias in biases]) if biases else None)
        return state

    return Layout(pack=pack, has_out=out is not None, text=text)


def per_head(name: str, order: str = LETTERS, *, out: str | None) -> Layout:
    """One linear layer with the rows of queries, key and value together for each key/value head.

    This fits a module that views its projection as (B, T, H, 3*K) before it splits it. If G < H, each group's rows
    begin with all of its query heads, as in Falcon (https://arxiv.org/abs/2311.16867).

    Raises:
        ValueError: `order` does not name q, k and v once each, or a name is not a string.
    """
    text = _text("per_head", name, order=order, out=out)
    _check(text, out, order, name=name)

    def pack(weights: Weights) -> dict[str, Tensor]:
        groups, (rows, biases) = len(weights.key), _layer(weights, order)
        together = [each.unflatten(0, (groups, -1)).flatten(1, 2) for each in rows]  # (H,K,D) -> (G,H/G*K,D)
        beside = [bias.reshape(groups, -1) for bias in biases]  # (H,K) -> (G,H/G*K)
        bias = torch.cat(beside, dim=1).flatten() if biases else None
        return out_state(weights, out) | linear(name, torch.cat(together, dim=1).flatten(0, 1), bias)

    return Layout(pack=pack, has_out=out is not None, text=text)


def head_list(prefix: str, *, query: str, key: str, value: str, out: str | None) -> Layout:
    """One module for each head, at `prefix` with {head} for its number, that holds linear layers query, key and value.

    Raises:
        ValueError: `prefix` has no place for the head's number, or the names are not three different strings.
    """
    text = _text("head_list", prefix, query=query, key=key, value=value, out=out)
    _check(text, out, prefix=prefix)
    _check(text, out, query=query, key=key, value=value)
    if "{head}" not in prefix:
        raise ValueError(
            f"{text} is not allowed: its prefix needs {{head}} for the number of the head, as in heads.{{head}}"
        )

    def pack(weights: Weights) -> dict[str, Tensor]:
        state = out_state(weights, out)
        for name, letter in ((query, "q"), (key, "k"), (value, "v")):
            (weight,), bias = _layer(weights, letter)
            for head in range(len(weight)):
                path = f"{prefix.replace('{head}', str(head))}.{name}"
                state |= linear(path, weight[head], bias[0][head] if bias else None)  # (K,D), (K,)
        return state

    return Layout(pack=pack, has_out=out is not None, text=text)


def transposed(layout: Layout) -> Layout:
    """`layout` with each weight (D, rows) instead of (rows, D), for x @ weight, as in the Conv1D of GPT-2.

    Raises:
        ValueError: the argument is not a layout.
    """
    check_layout("transposed", layout)

    def pack(weights: Weights) -> dict[str, Tensor]:
        return {name: tensor.T if tensor.dim() > 1 else tensor for name, tensor in layout.pack(weights).items()}

    return Layout(pack=pack, has_out=layout.has_out, text=f"transposed({layout.text})")


def _layer(weights: Weights, order: str) -> tuple[list[Tensor], list[Tensor]]:
    """Weights (H, K, D) and biases (H, K) of one layer, by letter; [] without biases, zeros for a missing one."""
    named = {"q": "query", "k": "key", "v": "value"}
    rows = [getattr(weights, named[letter]) for letter in order]
    biases = [getattr(weights, f"{named[letter]}_bias") for letter in order]
    if all(bias is None for bias in biases):
        return rows, []
    pairs = zip(rows, biases, strict=True)
    return rows, [torch.zeros_like(row[..., 0]) if bias is None else bias for row, bias in pairs]


def _text(maker: str, *by_position: object, **by_name: object) -> str:
    """A call as it appears in a user's file, for messages."""
    return f"{maker}({', '.join([*map(repr, by_position), *(f'{name}={value!r}' for name, value in by_name.items())])})"


def _check(text: str, out: object, order: object = LETTERS, **names: object) -> None:
    """Check that each name is a string, that no two name the same layer, and that `order` has each letter once."""
    for what, name in {**names, "out": out}.items():
        if not isinstance(name, str) and not (what == "out" and name is None):
            or_none = ", or None where the module has none" if what == "out" else ""
            raise ValueError(
                f"{text} is not allowed: {what} is {kind(name)}, and must be the name of a layer, as "
                f'module.named_modules() has it, such as "{what}_proj"{or_none}'
            )
    if same := [what for what, name in names.items() if list(names.values()).count(name) > 1]:
        raise ValueError(
            f"{text} is not allowed: {' and '.join(same)} are one layer: give three different ones; a layer that makes "
            "more than one is packed(...), per_head(...) or stacked(...)"
        )
    if not isinstance(order, str) or sorted(order) != sorted(LETTERS):
        raise ValueError(f"{text} is not allowed: its letters must name q, k and v once each, as in qkv or kqv")


def check_layout(text: str, layout: object) -> None:
    """Raise ValueError unless it is a layout."""
    if not isinstance(layout, Layout):
        raise ValueError(
            f"{text} is given {kind(layout)} for a layout: give split(...), packed(...), per_head(...), "
            "stacked(...), head_list(...), transposed(...) or Layout(pack=...); a function of query, key and value "
            'needs none, or layout="bthk"'
        )
