"""The canonical weights of multi-head attention, and layouts, which describe where a module stores them.

A layout converts the canonical weights to the module's state dict. It uses differentiable steps only, because the check
propagates gradients through it (docs/adr/0006). A name in a layout stands for the parameters NAME.weight and NAME.bias
of a linear layer. If the name contains {}, as in `in_proj_{}`, the words weight and bias replace the {}. If the
canonical weights have no biases, no layout creates any. Shapes: see contract/__init__.py.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attnbench.workloads.workload import Workload

LETTERS = {"q": "query", "k": "key", "v": "value"}
BIAS_NAMES = {**{letter: f"{name}_bias" for letter, name in LETTERS.items()}, "out": "out_bias"}
"""Names of the biases in `Weights`, by projection: q, k, v and out, as in the axis `bias`."""
ORDER = "".join(LETTERS)
HEAD = "{head}"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The canonical weights: one fixed form, which every implementation converts to the parameters of its module.

    Shapes: query (H, K, D), key (G, K, D), value (G, V, D), out (D, H*V), query_bias (H, K), key_bias (G, K),
    value_bias (G, V), out_bias (D,). `out` is None if there is no output projection; a missing bias is None, too.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    out_bias: Tensor | None = None

    @staticmethod
    def shapes(workload: Workload, embed_dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights and biases for a workload's heads and widths, by name; D is `embed_dim`."""
        heads, groups, width = workload.num_heads, workload.num_kv_heads, workload.head_dim
        return {
            "query": (heads, width, embed_dim),
            "key": (groups, width, embed_dim),
            "value": (groups, workload.value_dim, embed_dim),
            "out": (embed_dim, heads * workload.value_dim),
            "query_bias": (heads, width),
            "key_bias": (groups, width),
            "value_bias": (groups, workload.value_dim),
            "out_bias": (embed_dim,),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        """Return new weights, with `change` applied to each tensor."""
        return Weights(**{name: change(tensor) for name, tensor in self.tensors().items()})

    def biased(self, parts: Collection[str]) -> "Weights":
        """Return these weights with biases only for the projections `parts`, a subset of q, k, v and out."""
        dropped = {name for part, name in BIAS_NAMES.items() if part not in parts}
        return Weights(**{name: tensor for name, tensor in self.tensors().items() if name not in dropped})

    def filled(self) -> "Weights":
        """Return these weights; if some of query, key and value have a bias, the others get a bias of zeros."""
        if not self.has_bias:
            return self
        zeros = {f"{name}_bias": torch.zeros_like(getattr(self, name)[..., 0]) for name in LETTERS.values()}
        return Weights(**(zeros | self.tensors()))

    @property
    def has_bias(self) -> bool:
        """Whether at least one of the projections of query, key and value has a bias."""
        return any(bias is not None for bias in (self.query_bias, self.key_bias, self.value_bias))


def linear(name: str, weight: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
    """Return the state dict of a linear layer from its weight (rows, columns) and bias (rows,), each if it is not None.

    The words weight and bias replace {} in `name`, as in "attn.in_{}"; a name without {} stands for "NAME.{}".
    """
    path = name if "{}" in name else f"{name}.{{}}"
    entries = {path.replace("{}", part): tensor for part, tensor in (("weight", weight), ("bias", bias))}
    return {entry: tensor for entry, tensor in entries.items() if tensor is not None}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The places of the canonical weights among the parameters of a module.

    `pack` creates the module's state dict by differentiable steps only; entries that are None are left out. If
    `has_out` is False, the module has no output projection: its output is (B, T, H*V), and the adapter projects that
    to (B, T, D).
    """

    pack: Callable[[Weights], Mapping[str, Tensor | None]]
    has_out: bool = True

    def state(self, weights: Weights) -> dict[str, Tensor]:
        """Create the state dict of a module with these weights."""
        return {name: tensor for name, tensor in self.pack(weights).items() if tensor is not None}


def split(query: str, key: str, value: str, *, out: str | None) -> Layout:
    """Create the layout with one linear layer each for query (H*K, D), key (G*K, D) and value (G*V, D).

    `out` is the name of the output projection (D, H*V); None if there is none. A name with {head}, as in
    "heads.{head}.query", stands for one layer per head; the index of the head replaces {head}.

    Raises:
        ValueError: the names are not three different strings, or `out` is a boolean.
    """
    return _layout([(query, "q"), (key, "k"), (value, "v")], out)


def packed(name: str, order: str = ORDER, *, out: str | None, per_head: bool = False) -> Layout:
    """Create the layout with one linear layer (H*K + G*K + G*V, D), whose rows are in the `order` "qkv", "kqv", ...

    With `per_head` the rows of each key/value head are together, as in a module that views its projection as
    (B, T, H, 3*K) and then splits it. If G < H, the rows of all query heads of a key/value head take the place of q, as
    in Falcon (https://arxiv.org/abs/2311.16867). `out` is the name of the output projection; None if there is none.

    Raises:
        ValueError: `order` does not name q, k and v once each, or a name is not a string.
    """
    return _layout([(name, order)], out, per_head=per_head)


def stacked(parts: Mapping[str, str], *, out: str | None) -> Layout:
    """Create the layout of `parts`, which maps linear layers to their projections: {"to_q": "q", "to_kv": "kv"}.

    Raises:
        ValueError: the letters do not name q, k and v once each, or a name is not a string.
    """
    return _layout([*parts.items()], out)


def transposed(layout: Layout) -> Layout:
    """Return `layout` with each weight as (D, rows) instead of (rows, D), for x @ weight, as in GPT-2's Conv1D."""

    def pack(weights: Weights) -> dict[str, Tensor]:
        return {name: tensor.T if tensor.dim() > 1 else tensor for name, tensor in layout.state(weights).items()}

    return Layout(pack=pack, has_out=layout.has_out)


def _layout(parts: Sequence[tuple[str, str]], out: str | None, *, per_head: bool = False) -> Layout:
    """Create a layout from pairs of a linear layer's name and the letters of its projections, as in ("to_kv", "kv").

    The projections of a layer follow one another, or alternate by key/value head with `per_head`. If only some
    projections of a layer have a bias, the bias of the others is 0.
    """
    names = [name for name, _ in parts]
    if not all(isinstance(name, str) for name in names) or len({*names}) < len(names) or isinstance(out, bool):
        raise ValueError(
            "this layout is not allowed: give different names of layers, as in module.named_modules(), and out=None if "
            "the module has no output projection; if one layer computes more than one of query, key and value, use "
            "packed(...) or stacked(...)"
        )
    if sorted("".join(str(letters) for _, letters in parts)) != sorted(ORDER):
        raise ValueError("this layout is not allowed: its letters must name q, k and v once each, as in qkv or kqv")

    def joined(rows: list[Tensor]) -> Tensor:
        """Join weights (H, K, D) of several projections to one weight (rows, D), or biases (H, K) to one (rows,)."""
        groups = min(map(len, rows)) if per_head else 1
        together = [each.unflatten(0, (groups, -1)).flatten(1, 2) for each in rows]  # (H,K,..) -> (G,H/G*K,..)
        return torch.cat(together, dim=1).flatten(0, 1)  # (G,rows,..) -> (G*rows,..)

    def pack(weights: Weights) -> dict[str, Tensor]:
        state = {} if out is None else linear(out, weights.out, weights.out_bias)
        filled = weights.filled()
        for name, letters in parts:
            rows = [getattr(weights, LETTERS[letter]) for letter in letters]
            has_bias = any(getattr(weights, BIAS_NAMES[letter]) is not None for letter in letters)
            biases = [getattr(filled, BIAS_NAMES[letter]) for letter in letters] if has_bias else []
            if HEAD in name:
                for head, weight in enumerate(zip(*rows, strict=False)):
                    bias = torch.cat([each[head] for each in biases]) if biases else None
                    state |= linear(name.replace(HEAD, str(head)), torch.cat(weight), bias)
            else:
                state |= linear(name, joined(rows), joined(biases) if biases else None)
        return state

    return Layout(pack=pack, has_out=out is not None)
