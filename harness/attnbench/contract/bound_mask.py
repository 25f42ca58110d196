"""A mask bound to the sizes of a workload, as tensors on a device. Shapes: see contract/__init__.py."""

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnbench.workloads.batch import Cache
from attnbench.workloads.masks import Causal, Mask, Padding, Ragged, aligned_at_end

AXES = "bhts"  # axes of a full mask, in order: batch, heads, queries, keys
HALVES = (torch.bfloat16, torch.float16)
SPLIT = "split"
"""Value of `BoundMask.form`: a function gets the causal part as `is_causal`, and the rest as its mask."""


class BoundMask:
    """A mask at one workload's sizes on one device, with the call's scale, sinks and learned biases.

    Tensors are created at first use and memoized, so that timed calls do not create them. `inputs` are the inputs of a
    call other than query, key and value, by name; tensors derived from them are not memoized. `change` converts a mask
    to the form in which functions get it, and `form` is the name of that form. `is_training` says that the module
    is in training mode. `chunks` are the lengths of the parts in which a module with a cache gets its sequence. `lent`
    are further tensors that the code under test got, such as the pages of a cache, each with a copy that shows whether
    the code has changed it.
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
        cache: Cache | None = None,
    ) -> None:
        """Bind `rule` to `sizes` (B, T, S); a mask that changes scores needs `num_heads`.

        `scale` None means 1 / sqrt(K), as in scaled_dot_product_attention; `world_size` is the number of ranks of a
        call. `cache` describes the memory of the keys of a batch of requests; it is None for other workloads.
        """
        self.cache = cache
        self.rule, self.sizes, self.device = rule, sizes, torch.device(device)
        self.num_heads, self.scale, self.world_size = num_heads, scale, world_size
        self.inputs: Mapping[str, Tensor] = {}
        self.form = ""
        self.change: Callable[[Tensor, tuple[int, ...]], Tensor] = lambda mask, _: mask
        self.is_training = False
        self.chunks: tuple[int, ...] = ()
        self.lent: dict[str, tuple[Tensor, Tensor]] = {}
        self.is_causal = isinstance(rule, Causal)  # aligned at the start (top-left), without other masks
        self._forms: dict[Hashable, tuple[Tensor | None, Callable[[], Tensor | None]]] = {}

    def for_last(self, query_len: int, key_len: int) -> "BoundMask":
        """Return the mask of the last `query_len` queries of a sequence that has `key_len` keys so far.

        Raises:
            ValueError: a part of the mask cannot be aligned at the end.
        """
        rule = aligned_at_end(self.rule)
        sizes = (self.sizes[0], query_len, key_len)
        return BoundMask(rule, sizes, self.device, num_heads=self.num_heads, scale=self.scale)

    def scale_for(self, head_dim: int) -> float:
        """Return the factor of the products of queries and keys of width `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale

    @property
    def sinks(self) -> Tensor | None:
        """The score of each head's sink (H,), in the dtype of the inputs; None without sinks."""
        return self.inputs.get("sinks")

    def _form(self, name: Hashable, make: Callable[[], Tensor | None]) -> Tensor | None:
        """Return a form of the mask, memoized under `name` with the function `make` that creates it."""
        if name not in self._forms:
            self._forms[name] = make(), make  # `make` has already inserted the forms that it uses
        return self._forms[name][0]

    def restore(self) -> list[str]:
        """Restore memoized tensors that code under test has overwritten; return their names."""
        changed = []
        for name, (form, make) in self._forms.items():
            if form is not None and (right := make()) is not None and not torch.equal(form, right):
                self._forms[name] = right, make
                changed.append(name if isinstance(name, str) else f"bias in {form.dtype}")
        return changed

    @cached_property
    def _table(self) -> Any:  # noqa: ANN401 - whatever a mask's `table` gives
        return on_device(self.rule.table(*self.sizes), self.device)

    @property
    def per_head(self) -> list[Tensor]:
        """One tensor (H,) for each part of the mask that changes scores: a number per head, such as ALiBi's slope."""
        return [on_device(part.per_head(self.num_heads), self.device) for part in self.rule.changes]

    def sees(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether `query` sees `key` in batch row `batch`, for integer tensors that broadcast."""
        seen: Tensor = self.rule.sees(batch, query, key, self._table, self.sizes[2] - self.sizes[1])
        return seen

    @property
    def visible(self) -> Tensor | None:
        """Boolean mask, True where visible, broadcastable to (B, H, T, S); None if every key is visible."""

        def make() -> Tensor:
            batch, query, key = (torch.arange(size, device=self.device) for size in self.sizes)
            seen = self.sees(batch[:, None, None, None], query[:, None], key)
            return seen.reshape((1,) * (4 - seen.dim()) + seen.shape)

        return self._form("visible", make) if self.rule.hides else None

    @property
    def without_causal(self) -> Tensor | None:
        """Boolean mask like `visible`, without the causal part of the mask; None if no other part hides keys."""
        if (rest := self.rule.without_causal) is None:
            return None
        return self._form(f"{rest} alone", lambda: BoundMask(rest, self.sizes, self.device).visible)

    @property
    def hidden(self) -> Tensor | None:
        """Boolean mask, True where hidden, in the shape of `visible`; None if every key is visible."""
        return self._form("hidden", lambda: None if self.visible is None else ~self.visible)

    def visible_as(self, axes: str) -> Tensor | None:
        """Return `visible` in full size, with only the axes in `axes`, in that order; None if every key is visible.

        `axes` is a text such as "bts", "tsb" or "bs": letters b, h, t and s, or n for batch and heads as one axis.

        Raises:
            NotImplementedError: the mask differs along an axis that is left out.
            ValueError: `axes` has another letter, or a letter twice.
        """
        return self._form(f"visible as {axes}", lambda: self._arranged(self.visible, axes))

    def hidden_as(self, axes: str) -> Tensor | None:
        """Return `hidden` in full size, with `axes` as in `visible_as`; None if every key is visible."""
        return self._form(f"hidden as {axes}", lambda: self._arranged(self.hidden, axes))

    def added_as(self, axes: str, dtype: torch.dtype) -> Tensor | None:
        """Return `added(dtype)` in full size, with `axes` as in `visible_as`; None if there is nothing to add."""
        if self.rule.is_learned:
            return self._arranged(self.added(dtype), axes)
        return self._form(("added", axes, dtype), lambda: self._arranged(self.added(dtype), axes))

    def _arranged(self, dense: Tensor | None, axes: str) -> Tensor | None:
        """Expand `dense` (1 or B, 1 or H, 1 or T, S) to full size, and order its axes as in `axes`; None for None."""
        letters = axes.replace("n", "bh")
        if sorted(letters) != sorted({*letters} & {*AXES}):
            raise ValueError(f"{axes!r} is not allowed: axes of a mask are b, h, t and s, or n for b and h, once each")
        if dense is None:
            return None
        for letter, size in zip(AXES, dense.shape, strict=True):
            if letter not in letters and size > 1:
                raise NotImplementedError(f"mask {self.rule} differs along {letter}, and the code takes {axes}")
        whole = dense.expand(self.sizes[0], self.num_heads or 1, *self.sizes[1:])
        absent = [axis for axis in AXES if axis not in letters]
        arranged = whole.permute([AXES.index(axis) for axis in (*absent, *letters)])
        for _ in absent:
            arranged = arranged[0]
        return arranged.flatten(axes.index("n"), axes.index("n") + 1) if "n" in axes else arranged.contiguous()

    @property
    def empty(self) -> Tensor | None:
        """Boolean mask (B, 1, T, 1), True for queries that see no key, whose output is 0; None if all see a key."""

        def make() -> Tensor | None:
            if self.hidden is None or not self.rule.has_empty_rows(*self.sizes):
                return None
            return self.hidden.expand(self.sizes[0], 1, *self.sizes[1:]).all(dim=-1, keepdim=True)

        return self._form("empty", make)

    @property
    def lengths(self) -> Tensor | None:
        """The number of keys of each batch row (B,) under the masks padding and ragged; None under other masks."""
        for part in self.rule.parts:
            if isinstance(part, Padding | Ragged):
                return on_device(part.lengths(*self.sizes), self.device)  # type: ignore[no-any-return]
        return None

    def added(self, dtype: torch.dtype, *, hides: bool = True) -> Tensor | None:
        """Return the additive mask (1 or B, 1 or H, 1 or T, S): biases, and -inf where hidden unless `hides` is False.

        The result is None if there is nothing to add, and does not include a softcap. A mask with a learned bias is
        computed again at each use, so that gradients reach the bias; any other mask is memoized.
        """
        if not (hides and self.rule.hides) and not any(part.is_additive for part in self.rule.changes):
            return None
        if self.rule.is_learned:
            return self._sum(dtype, hides=hides)
        return self._form(("bias", dtype, hides), lambda: self._sum(dtype, hides=hides))

    def _sum(self, dtype: torch.dtype, *, hides: bool) -> Tensor:
        batch_size, query_len, key_len = self.sizes
        sizes = (batch_size, self.num_heads, query_len, key_len)
        indices = [torch.arange(size, device=self.device) for size in sizes]
        row, head, query, key = (index[(..., *[None] * (3 - axis))] for axis, index in enumerate(indices))
        total = torch.zeros(1, 1, 1, 1, dtype=dtype, device=self.device)
        for part, per_head, index in zip(self.rule.changes, self.per_head, self._indices, strict=True):
            if part.is_learned:
                total = total + part.looked_up(widened(self.inputs), (row, head, query), index).to(dtype)
            elif part.is_additive:
                total = total + part.bias(per_head[:, None, None], query, key, key_len - query_len).to(dtype)
        return torch.where(self.hidden, -torch.inf, total) if hides and self.hidden is not None else total

    @cached_property
    def _indices(self) -> list[tuple[Tensor, ...]]:
        """For each part of the mask that changes scores, indices into its learned bias, broadcastable to (T, S)."""
        _, query_len, key_len = self.sizes
        query, key = torch.arange(query_len, device=self.device)[:, None], torch.arange(key_len, device=self.device)
        return [part.index(query, key, key_len - query_len, key_len) for part in self.rule.changes]

    def handed(self, mask: Tensor | None) -> Tensor | None:
        """Use `change` to convert a mask or bias to the form in which functions get it; None stays None."""
        return None if mask is None else self.change(mask, (self.sizes[0], self.num_heads, *self.sizes[1:]))


def widened(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert half-precision tensors to float32, so that the sums in their gradients stay accurate.

    Many pairs share one parameter, so its gradient is a long sum. In bfloat16, most of 10^5 terms would be lost.
    """
    return {name: tensor.float() if tensor.dtype in HALVES else tensor for name, tensor in inputs.items()}


def on_device(table: Any, device: torch.device) -> Any:  # noqa: ANN401 - whatever a mask's `table` gives
    """Convert the numpy arrays in a mask's table to tensors on the device."""
    if isinstance(table, tuple):
        return tuple(on_device(part, device) for part in table)
    return torch.from_numpy(table).to(device) if isinstance(table, np.ndarray) else table
