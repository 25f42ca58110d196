"""Work that the harness does outside a function's call, so that the function computes only attention.

Grouped heads are repeated, score changes become a mask of numbers, sinks become one more key, queries that see no key
see all of them and give 0 afterwards, and axes are moved. All of it happens before a timed call and is never timed.

Shapes as in the contract.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody imports it


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A function's call with its arguments in place.

    `tensors` are passed by position and `passed` by name; `empty`, broadcastable to (B, H, T, V), marks the output of
    queries that see no key, which becomes 0; `is_tokens_first` says that the output is (B, T, H, V).
    """

    tensors: tuple[Tensor, ...]
    passed: dict[str, Any]
    empty: Tensor | None = None
    is_tokens_first: bool = False

    def finish(self, output: Tensor) -> Tensor:
        """The function's output as (B, H, T, V)."""
        output = output.transpose(1, 2) if self.is_tokens_first else output
        return output if self.empty is None else output.masked_fill(self.empty, 0.0)


class Bound:
    """A function's call with everything in place: `call` has no arguments and only calls the function.

    Tensors that `prepare` creates, such as repeated heads, are their own leaves: a backward pass ends there.
    """

    def __init__(self, function: Callable[..., Tensor], prepare: Callable[..., Prepared], inputs: list[Tensor]) -> None:
        self._prepare, self._inputs = prepare, inputs
        with torch.enable_grad():
            self._prepared = prepare(*inputs)
        self._tensors = [as_leaf(tensor) for tensor in self._prepared.tensors]
        self._passed = {name: as_leaf(value) for name, value in self._prepared.passed.items()}
        self.call: Callable[[], Tensor] = partial(function, *self._tensors, **self._passed)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that have gradients: query, key and value, then those passed by name."""
        values = [*self._tensors, *self._passed.values()]
        return [value for value in values if isinstance(value, Tensor) and value.requires_grad]

    @property
    def is_plain(self) -> bool:
        """Whether nothing is done outside: the function gets the inputs themselves, and its output is the answer."""
        prepared = self._prepared
        has_finish = prepared.empty is not None or prepared.is_tokens_first
        made = [*prepared.tensors, *prepared.passed.values()]
        has_graph = any(isinstance(value, Tensor) and not value.is_leaf for value in made)
        are_inputs = all(one is other for one, other in zip(prepared.tensors, self._inputs, strict=True))
        return are_inputs and not has_finish and not has_graph

    def refresh(self) -> None:
        """Prepare again into the same memory, after the inputs' values have changed."""
        with torch.no_grad():
            prepared = self._prepare(*self._inputs)
            fresh = [*prepared.tensors, *prepared.passed.values()]
            for value, right in zip([*self._tensors, *self._passed.values()], fresh, strict=True):
                if isinstance(value, Tensor) and value.data_ptr() != right.data_ptr():
                    value.copy_(right)


def as_leaf(value: Any) -> Any:  # noqa: ANN401 - an argument of any kind
    """A tensor detached from its graph, with its own gradient; any other value unchanged."""
    return value if not isinstance(value, Tensor) or value.is_leaf else value.detach().requires_grad_()


def repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """(B, G, S, K) -> (B, H, S, K): each key/value head repeated for its query heads; the tensor itself if G == H."""
    group_size = num_heads // tensor.shape[1]
    return tensor if group_size == 1 else tensor.repeat_interleave(group_size, dim=1)


def show_rows(mask: Tensor, empty: Tensor) -> Tensor:
    """A mask, boolean or of numbers, in which the queries of `empty` see every key."""
    return mask | empty if mask.dtype == torch.bool else mask.masked_fill(empty, 0.0)


def as_numbers(mask: Tensor | None, like: Tensor, key_len: int) -> Tensor:
    """A mask as numbers to add to the scores of queries `like` (B, H, T, K), -inf where hidden: (..., T, S)."""
    zeros = torch.zeros((1, 1, like.shape[2], key_len), dtype=like.dtype, device=like.device)
    if mask is None:
        return zeros
    return zeros.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask + zeros


def add_sink(numbers: Tensor, sinks: Tensor) -> Tensor:
    """A mask of numbers (..., T, S) with the score of one more key for each head, sinks (H,): (..., H, T, S + 1)."""
    shape = (len(numbers), len(sinks), *numbers.shape[2:])
    column = sinks.to(numbers.dtype)[:, None, None].expand(*shape[:-1], 1)  # (H,) -> (B,H,T,1)
    return torch.cat([numbers.expand(shape), column], dim=-1)


def add_key(tensor: Tensor) -> Tensor:
    """(B, G, S, K) -> (B, G, S + 1, K): one more key, or value, of zeros."""
    return F.pad(tensor, (0, 0, 0, 1))
