"""A mask bound to the sizes of a workload, as tensors on a device. Shapes as in the contract."""

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attnbench.contract.memory import MASK_FORMS
from attnbench.workloads.masks import Causal, Mask, Padding

ALL = slice(None)
Index = int | slice
Places = tuple[Index, Index, Index, Index]
EVERYWHERE: Places = (ALL, ALL, ALL, ALL)
"""Batch rows, heads, queries, keys."""
Kept = TypeVar("Kept")
HALVES = (torch.bfloat16, torch.float16)
KEPT_FORMS = ("_table", "per_head", "visible", "hidden", "empty")


class BoundMask:
    """All that is done to the products of query and key before their softmax, at one workload's sizes on one device.

    They are multiplied by the scale, changed by the mask, hidden by it, and joined by the sinks.
    Tensors are made at first use and kept, so that a call after the first pays nothing for them; they count as inputs.
    `inputs` are those that a call is given besides query, key and value, by name: what is made of them is not kept.
    """

    def __init__(  # noqa: PLR0913 - all but the first three have defaults, and are named
        self,
        rule: Mask,
        sizes: tuple[int, int, int],
        device: torch.device | str,
        *,
        num_heads: int = 0,
        scale: float | None = None,
        world_size: int = 1,
    ) -> None:
        """Bind `rule` to `sizes` (B, T, S).

        `scale` is None where it is 1 / sqrt(K), as in scaled_dot_product_attention; `world_size` is how many ranks
        compute a call.

        Raises:
            ValueError: the mask changes scores, which it does for each head, and `num_heads` is not given.
        """
        if rule.changes_scores and not num_heads:
            raise ValueError(f"mask {rule} changes the scores of each head: give num_heads")
        self.rule = rule
        self.sizes = sizes
        self.num_heads = num_heads
        self.scale = scale
        self.world_size = world_size
        self.inputs: Mapping[str, Tensor] = {}
        self.form = ""  # one of MASK_FORMS, in which functions are handed it
        self.device = torch.device(device)
        self.changes_scores = rule.changes_scores  # by `adjust`; else the mask only hides keys
        self.is_none = not (rule.hides or rule.changes_scores)  # every key is visible and keeps its score
        self.is_causal = isinstance(rule, Causal)  # aligned at the start (top-left), and nothing else
        self.is_padding = isinstance(rule, Padding)  # it depends on batch row and key alone
        self._table = on_device(rule.table(*sizes), self.device)
        self.per_head = [on_device(part.per_head(num_heads), self.device) for part in rule.changes]
        self._forms: dict[Hashable, Any] = {}

    def scale_for(self, head_dim: int) -> float:
        """What products of queries and keys of that width are multiplied by."""
        return head_dim**-0.5 if self.scale is None else self.scale

    @property
    def sinks(self) -> Tensor | None:
        """The score of each head's sink (H,), in the dtype of the inputs; None where there are none."""
        return self.inputs.get("sinks")

    def keep(self, name: Hashable, make: Callable[[], Kept]) -> Kept:
        """The result of `make`, called at the first use of this name: a form of the mask that few kernels need."""
        if name not in self._forms:
            self._forms[name] = make()
        kept: Kept = self._forms[name]
        return kept

    def restore(self) -> list[str]:
        """Put right what is no longer as the rule says, since somebody wrote into it; return the names.

        A form that an implementation keeps under a name of its own is that implementation's.
        """
        anew, changed = BoundMask(self.rule, self.sizes, self.device, num_heads=self.num_heads), []
        anew.inputs = self.inputs
        for name in KEPT_FORMS:
            if name in vars(self) and not _are_equal(vars(self)[name], getattr(anew, name)):
                vars(self)[name] = getattr(anew, name)
                changed.append(name.lstrip("_"))
        for key, form in self._forms.items():
            right: Any
            if isinstance(key, int):
                right, words = anew.index(key), f"index of bias {key}"
            elif isinstance(key, torch.dtype):
                right, words = anew.numbers(key), f"bias in {key}"
            elif isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], torch.dtype):  # noqa: PLR2004
                right, words = anew._added(*key, EVERYWHERE), f"bias {key[0]} in {key[1]}"
            else:
                continue
            if not _are_equal(form, right):
                self._forms[key] = right
                changed.append(words)
        return changed

    def sees(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether `query` sees `key` in that batch row: the rule itself, on whole numbers that broadcast."""
        seen: Tensor = self.rule.sees(batch, query, key, self._table, self.sizes[2] - self.sizes[1])
        return seen

    @cached_property
    def visible(self) -> Tensor | None:
        """Boolean, True where visible, broadcastable to (B, H, T, S); None where every key is visible."""
        return self.tile(slice(0, self.sizes[1]), slice(0, self.sizes[2]))

    @cached_property
    def hidden(self) -> Tensor | None:
        """The opposite of `visible`."""
        return None if self.visible is None else ~self.visible

    @cached_property
    def empty(self) -> Tensor | None:
        """Boolean (B, 1, T, 1), True for a query that sees no key, whose output is 0; None where each sees one."""
        if not self.rule.has_empty_rows(*self.sizes) or self.hidden is None:
            return None
        return self.hidden.expand(self.sizes[0], 1, *self.sizes[1:]).all(dim=-1, keepdim=True)

    def tile(self, queries: slice, keys: slice) -> Tensor | None:
        """`visible` for some queries and keys, computed from the rule without the dense form."""
        if not self.rule.hides:
            return None
        batch = torch.arange(self.sizes[0], device=self.device)[:, None, None, None]
        query = torch.arange(queries.start, queries.stop, device=self.device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=self.device)
        seen = self.sees(batch, query, key)
        return seen.reshape((1,) * (4 - seen.dim()) + seen.shape)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as numbers to add to the scores, broadcastable to (B, H, T, S), -inf where hidden.

        None for the mask `none`, and where the change depends on the score, as with softcap. A learned bias is looked
        up each time, with its gradient.
        """
        return None if self.is_none or not self.rule.is_additive else self.numbers(dtype)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The parts that only add or hide as numbers to add, broadcastable to (B, H, T, S), -inf where hidden."""

        def make() -> Tensor:
            added = torch.zeros(1, 1, 1, 1, dtype=dtype, device=self.device)
            for number, part in enumerate(self.rule.changes):
                if part.is_additive:
                    added = added + self._added(number, dtype, EVERYWHERE)
            return added if self.hidden is None else torch.where(self.hidden, -torch.inf, added)

        return make() if self.rule.is_learned else self.keep(dtype, make)

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """`bias` for modules that add their mask: (1 or B, 1 or H, T, S), 0 where visible and -inf where hidden."""
        return self.bias(dtype)

    @property
    def lengths(self) -> Tensor | None:
        """The number of keys (B,) of each batch row that are no padding; None without padding."""
        tables = [part.table(*self.sizes) for part in self.rule.parts if isinstance(part, Padding)]
        return on_device(tables[0], self.device) if tables else None

    def handed(self, mask: Tensor | None) -> Tensor | None:
        """What a function is handed for its mask or bias: the same in this mask's form."""
        if mask is None or not self.form:
            return mask
        return MASK_FORMS[self.form](mask, (self.sizes[0], self.num_heads, *self.sizes[1:]))

    def explicit(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as one tensor, for a call that takes either: boolean, True where visible, or the `bias`; or None."""
        return self.bias(dtype) if self.changes_scores else self.visible

    def adjust(
        self, scores: Tensor, *, rows: Index = ALL, heads: Index = ALL, queries: Index = ALL, keys: Index = ALL
    ) -> Tensor:
        """The scores as the mask changes them, before keys are hidden; unchanged under a mask that only hides.

        `scores` are those of (B, H, T, S) at [rows, heads, queries, keys]: a number removes its axis, as in indexing.
        The bias of a tile is computed from the rule; that of whole rows is kept from the first use; a learned one is
        looked up.
        """
        for number, part in enumerate(self.rule.changes):
            if part.is_additive:
                scores = scores + self._kept(number, scores.dtype, (rows, heads, queries, keys))
            else:
                scores = part.transform(scores)
        return scores

    def derivative(
        self, scores: Tensor, *, heads: Index = ALL, queries: Index = ALL, keys: Index = ALL
    ) -> Tensor | None:
        """The derivative of `adjust` at those scores; None where it is 1 everywhere."""
        if self.rule.is_additive:
            return None
        rate = torch.ones_like(scores)
        for number, part in enumerate(self.rule.changes):
            if part.is_additive:
                scores = scores + self._kept(number, scores.dtype, (ALL, heads, queries, keys))
            else:
                rate, scores = rate * part.derivative(scores), part.transform(scores)
        return rate

    def _kept(self, number: int, dtype: torch.dtype, places: Places) -> Tensor:
        """The bias of a part at those places; kept where it is not learned, and is of whole rows."""
        _, heads, queries, keys = places
        is_tile = any(isinstance(index, slice) and index != ALL for index in (queries, keys))
        if is_tile or self.rule.changes[number].is_learned:
            return self._added(number, dtype, places)
        whole = self.keep((number, dtype), lambda: self._added(number, dtype, EVERYWHERE))
        return whole[heads, queries, keys]

    def _added(self, number: int, dtype: torch.dtype, places: Places) -> Tensor:
        """The same afresh: looked up, or from the rule, in float64 and rounded once.

        A learned one begins with the batch rows; any other is the same in all of them, and begins with the heads.
        """
        part, sizes = self.rule.changes[number], (self.sizes[0], self.num_heads, *self.sizes[1:])
        indices = [torch.arange(size, device=self.device)[index] for size, index in zip(sizes, places, strict=True)]
        after = [sum(later.dim() for later in indices[place + 1 :]) for place in range(len(indices))]
        row, head, query, key = (index[(..., *[None] * count)] for index, count in zip(indices, after, strict=True))
        if part.is_learned:
            index = self.index(number)
            if places[2:] != (ALL, ALL):
                index = tuple(each.expand(self.sizes[1:])[places[2:]] for each in index)
            found: Tensor = part.looked_up(widened(self.inputs), (row, head, query), index)
            return found.to(dtype)
        bias: Tensor = part.bias(self.per_head[number][head], query, key, self.sizes[2] - self.sizes[1])
        return bias.to(dtype)

    def index(self, number: int) -> tuple[Tensor, ...]:
        """Where the learned bias of a part is looked up, each broadcastable to (T, S); kept from the first use."""
        _, query_len, key_len = self.sizes
        query, key = torch.arange(query_len, device=self.device)[:, None], torch.arange(key_len, device=self.device)
        part = self.rule.changes[number]
        return self.keep(number, lambda: part.index(query, key, key_len - query_len, key_len))


def widened(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in float32 where they have half precision: the gradient of a number that many pairs look up is a sum.

    In half precision, what comes late in a long sum is lost: of 10^5 numbers in bfloat16, nearly all.
    """
    return {name: tensor.float() if tensor.dtype in HALVES else tensor for name, tensor in inputs.items()}


def _are_equal(one: Any, other: Any) -> bool:  # noqa: ANN401 - tensors, perhaps several, or what is none
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one is other or one == other)


def on_device(table: Any, device: torch.device) -> Any:  # noqa: ANN401 - whatever a mask's `table` gives
    """A mask's table with its numpy arrays as tensors on the device."""
    if isinstance(table, tuple):
        return tuple(on_device(part, device) for part in table)
    return torch.from_numpy(table).to(device) if isinstance(table, np.ndarray) else table
