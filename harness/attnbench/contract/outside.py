"""Work that the harness does outside a function's call, so that the function computes only attention.

Depending on the function, the harness repeats grouped heads, converts score changes to an additive mask, adds a key for
the sinks, and permutes axes. It shows all keys to queries that see none, and sets their output to 0 after the call.
None of this is timed. Shapes: see contract/__init__.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The arguments of a function's call, and the form of its output.

    `tensors` are passed by position and `passed` by name. `empty`, boolean and broadcastable to (B, H, T, V), marks
    queries that see no key; their output becomes 0. `is_tokens_first` says that the output is (B, T, H, V), and
    `is_packed` that it is (tokens, H, V).
    """

    tensors: tuple[Tensor, ...]
    passed: dict[str, Any]
    empty: Tensor | None = None
    is_tokens_first: bool = False
    is_packed: bool = False

    @property
    def arguments(self) -> list[Any]:
        """All arguments: the tensors, then those passed by name."""
        return [*self.tensors, *self.passed.values()]

    def finish(self, output: Tensor) -> Tensor:
        """Convert the function's output to (B, H, T, V), with 0 for the queries in `empty`."""
        if self.is_packed:
            return output.transpose(0, 1)[None]  # (T,H,V) -> (1,H,T,V)
        output = output.transpose(1, 2) if self.is_tokens_first else output
        return output if self.empty is None else output.masked_fill(self.empty, 0.0)


class Bound:
    """A function's call with its arguments prepared: `call` has no arguments and only calls the function.

    Tensors that `prepare` creates, such as repeated heads, are leaves of the graph, where a backward pass ends.
    If `is_plain`, `prepare` creates no tensors and the function's output is final; otherwise `finish` converts the
    output. `leaves` are the tensors that require gradients: query, key and value, then those passed by name.
    """

    def __init__(self, function: Callable[..., Tensor], prepare: Callable[[], Prepared], inputs: list[Tensor]) -> None:
        self.prepare = prepare
        with torch.enable_grad():
            first = prepare()
        self.finish: Callable[[Any], Tensor] = first.finish
        self._arguments = [
            value if not isinstance(value, Tensor) or value.is_leaf else value.detach().requires_grad_()
            for value in first.arguments
        ]
        num_tensors = len(first.tensors)
        tensors, named = self._arguments[:num_tensors], self._arguments[num_tensors:]
        self.call: Callable[[], Any] = partial(function, *tensors, **dict(zip(first.passed, named, strict=True)))
        self.leaves = [each for each in self._arguments if isinstance(each, Tensor) and each.requires_grad]
        plain = [*inputs, *first.passed.values()]
        are_same = not first.is_packed and all(one is other for one, other in zip(self._arguments, plain, strict=True))
        self.is_plain = are_same and first.empty is None and not (first.is_tokens_first or first.is_packed)

    def refresh(self) -> None:
        """Prepare the arguments again, in the same memory, after the values of the inputs have changed."""
        with torch.no_grad():
            for value, right in zip(self._arguments, self.prepare().arguments, strict=True):
                if isinstance(value, Tensor) and value.data_ptr() != right.data_ptr():
                    value.copy_(right)

    def gradients(self, made: Sequence[Tensor | None], inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Propagate the gradients of the leaves (`made`) back to `inputs`; return one for each input, or None.

        A leaf is an input itself, or a tensor that `prepare` computes from inputs, such as repeated heads. The result
        is None for an input that no gradient reaches.
        """
        with torch.enable_grad():
            prepared = [each for each in self.prepare().arguments if isinstance(each, Tensor) and each.requires_grad]
        known = [(each, gradient) for each, gradient in zip(prepared, made, strict=True) if gradient is not None]
        outputs, gradients = [each for each, _ in known], [gradient for _, gradient in known]
        return torch.autograd.grad(outputs, inputs, gradients, allow_unused=True) if known else (None,) * len(inputs)


def repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Repeat each key/value head for its query heads: (B, G, S, K) -> (B, H, S, K), the tensor itself if G == H.

    The result keeps the order of axes in memory, so that code that misreads strides fails with repeated heads, too.
    """
    group_size = num_heads // tensor.shape[1]
    if group_size == 1:
        return tensor
    order = sorted(range(4), key=lambda axis: -tensor.stride()[axis] or -math.inf)  # expanded axes come first
    dense = tensor.permute(order).repeat_interleave(group_size, dim=order.index(1))
    return dense.permute([order.index(axis) for axis in range(4)])


def show_rows(mask: Tensor, empty: Tensor) -> Tensor:
    """Return the mask (B or 1, H or 1, T or 1, S) with every key visible to the queries in `empty` (B, 1, T, 1).

    `mask` is boolean (True = visible) or additive. In an additive mask, these queries also lose their biases.
    """
    return mask | empty if mask.dtype == torch.bool else mask.masked_fill(empty, 0.0)


def add_sink(mask: Tensor | None, sinks: Tensor, query: Tensor, num_keys: int) -> Tensor:
    """Return `mask` as an additive mask (B or 1, H, T, S + 1), in which the last key has the scores `sinks` (H,).

    `mask` is boolean (True = visible), additive or None. `query` is (B, H, T, K), and `num_keys` is S.
    """
    scores = query.new_zeros(1, query.shape[1], query.shape[2], num_keys)  # (1,H,T,S)
    if mask is not None:
        scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)  # (H,) -> (B,H,T,1)
    return torch.cat([scores, column], dim=-1)


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Put a module into training mode inside the context, with all of its dropout probabilities set to 0."""
    parts = [*module.modules()]
    modes = [part.training for part in parts]
    shares = [
        (part, name, value)
        for part in parts
        for name, value in vars(part).items()
        if isinstance(value, float) and "drop" in (type(part).__name__ if name == "p" else name).lower()
    ]
    try:
        for part, name, _ in shares:
            setattr(part, name, 0.0)
        module.train()
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        for part, name, value in shares:
            setattr(part, name, value)
