"""A mask bound to the sizes of a workload, as tensors on a device. Shapes as in the contract."""

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attnbench.contract.memory import MASK_FORMS
from attnbench.workloads.masks import Causal, Mask, Padding

Kept = TypeVar("Kept")
HALVES = (torch.bfloat16, torch.float16)
KEPT_FORMS = ("_table", "per_head", "visible", "hidden", "empty")


class BoundMask:
    """Everything between the products of query and key and their softmax, at one workload's sizes on one device.

    The products are multiplied by the scale, changed by the mask, hidden by it, and joined by the sinks. Tensors are
    created at first use and kept, so that later calls pay nothing for them; they count as inputs. `inputs` are the
    other inputs of a call besides query, key and value, by name; tensors derived from them are not kept.
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

        `scale` None means 1 / sqrt(K), as in scaled_dot_product_attention; `world_size` is the number of ranks of a
        call.

        Raises:
            ValueError: the mask changes scores, which needs `num_heads`, and that is missing.
        """
        if rule.changes_scores and not num_heads:
            raise ValueError(f"mask {rule} changes the scores of each head: give num_heads")
        self.rule = rule
        self.sizes = sizes
        self.num_heads = num_heads
        self.scale = scale
        self.world_size = world_size
        self.inputs: Mapping[str, Tensor] = {}
        self.form = ""  # one of MASK_FORMS, the form in which functions get it
        self.is_inference = False  # whether an isolated process calls in torch.inference_mode
        self.device = torch.device(device)
        self.changes_scores = rule.changes_scores  # through `adjust`; otherwise the mask only hides keys
        self.is_none = not (rule.hides or rule.changes_scores)  # every key is visible and keeps its score
        self.is_causal = isinstance(rule, Causal)  # aligned at the start (top-left), and nothing else
        self.is_padding = isinstance(rule, Padding)  # it depends on batch row and key only
        self._table = on_device(rule.table(*sizes), self.device)
        self.per_head = [on_device(part.per_head(num_heads), self.device) for part in rule.changes]
        self._forms: dict[Hashable, Any] = {}

    def scale_for(self, head_dim: int) -> float:
        """The factor of products of queries and keys of that width."""
        return head_dim**-0.5 if self.scale is None else self.scale

    @property
    def sinks(self) -> Tensor | None:
        """The score of each head's sink (H,), in the dtype of the inputs; None if there are none."""
        return self.inputs.get("sinks")

    def keep(self, name: Hashable, make: Callable[[], Kept]) -> Kept:
        """The result of `make`, memoized by name: for forms of the mask that few kernels need."""
        if name not in self._forms:
            self._forms[name] = make()
        kept: Kept = self._forms[name]
        return kept

    def restore(self) -> list[str]:
        """Restore tensors that a caller has overwritten; return their names.

        Forms that an implementation keeps under its own names are left alone.
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
                right, words = anew._added(*key), f"bias {key[0]} in {key[1]}"
            else:
                continue
            if not _are_equal(form, right):
                self._forms[key] = right
                changed.append(words)
        return changed

    def sees(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether `query` sees `key` in that batch row: the rule itself, on integers that broadcast."""
        seen: Tensor = self.rule.sees(batch, query, key, self._table, self.sizes[2] - self.sizes[1])
        return seen

    @cached_property
    def visible(self) -> Tensor | None:
        """Boolean, True where visible, broadcastable to (B, H, T, S); None if every key is visible."""
        if not self.rule.hides:
            return None
        batch, query, key = (torch.arange(size, device=self.device) for size in self.sizes)
        seen = self.sees(batch[:, None, None, None], query[:, None], key)
        return seen.reshape((1,) * (4 - seen.dim()) + seen.shape)

    @cached_property
    def hidden(self) -> Tensor | None:
        """The opposite of `visible`."""
        return None if self.visible is None else ~self.visible

    @cached_property
    def empty(self) -> Tensor | None:
        """Boolean (B, 1, T, 1), True for a query that sees no key, whose output is 0; None if there is none."""
        if not self.rule.has_empty_rows(*self.sizes) or self.hidden is None:
            return None
        return self.hidden.expand(self.sizes[0], 1, *self.sizes[1:]).all(dim=-1, keepdim=True)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as numbers to add to the scores, broadcastable to (B, H, T, S), -inf where hidden.

        None for the mask `none`, and if the change depends on the score, as with softcap. A learned bias is looked up
        each time, with its gradient.
        """
        return None if self.is_none or not self.rule.is_additive else self.numbers(dtype)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The parts that only add or hide, as numbers to add, broadcastable to (B, H, T, S), -inf where hidden."""

        def make() -> Tensor:
            added = torch.zeros(1, 1, 1, 1, dtype=dtype, device=self.device)
            for number, part in enumerate(self.rule.changes):
                if part.is_additive:
                    added = added + self._added(number, dtype)
            return added if self.hidden is None else torch.where(self.hidden, -torch.inf, added)

        return make() if self.rule.is_learned else self.keep(dtype, make)

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """`bias` for modules that add their mask: (1 or B, 1 or H, T, S), 0 where visible and -inf where hidden."""
        return self.bias(dtype)

    @property
    def lengths(self) -> Tensor | None:
        """The number of real keys (B,) of each batch row; None without padding."""
        tables = [part.table(*self.sizes) for part in self.rule.parts if isinstance(part, Padding)]
        return on_device(tables[0], self.device) if tables else None

    def handed(self, mask: Tensor | None) -> Tensor | None:
        """A mask or bias in this mask's `form`, as functions get it."""
        if mask is None or not self.form:
            return mask
        return MASK_FORMS[self.form](mask, (self.sizes[0], self.num_heads, *self.sizes[1:]))

    def explicit(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as one tensor, for calls that take either kind: boolean, True where visible, or `bias`; or None."""
        return self.bias(dtype) if self.changes_scores else self.visible

    def adjust(self, scores: Tensor) -> Tensor:
        """The scores (B, H, T, S) after the mask's changes, before keys are hidden."""
        for number, part in enumerate(self.rule.changes):
            scores = scores + self._added(number, scores.dtype) if part.is_additive else part.transform(scores)
        return scores

    def _added(self, number: int, dtype: torch.dtype) -> Tensor:
        """The numbers (1 or B, H, T, S) that a part adds: looked up each time, or computed in float64 and kept."""
        part, (batch_size, query_len, key_len) = self.rule.changes[number], self.sizes
        sizes = (batch_size, self.num_heads, query_len, key_len)
        indices = [torch.arange(size, device=self.device) for size in sizes]
        row, head, query, key = (index[(..., *[None] * (3 - axis))] for axis, index in enumerate(indices))
        if part.is_learned:
            found: Tensor = part.looked_up(widened(self.inputs), (row, head, query), self.index(number))
            return found.to(dtype)

        def make() -> Tensor:
            bias: Tensor = part.bias(self.per_head[number][:, None, None], query, key, key_len - query_len)
            return bias.to(dtype)

        return self.keep((number, dtype), make)

    def index(self, number: int) -> tuple[Tensor, ...]:
        """The indices into a part's learned bias, each broadcastable to (T, S); kept after the first use."""
        _, query_len, key_len = self.sizes
        query, key = torch.arange(query_len, device=self.device)[:, None], torch.arange(key_len, device=self.device)
        part = self.rule.changes[number]
        return self.keep(number, lambda: part.index(query, key, key_len - query_len, key_len))


def widened(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert half precision tensors to float32, because many pairs share a number and its gradient is a sum.

    In half precision, late terms of a long sum are lost: of 10^5 numbers in bfloat16, nearly all.
    """
    return {name: tensor.float() if tensor.dtype in HALVES else tensor for name, tensor in inputs.items()}


def _are_equal(one: Any, other: Any) -> bool:  # noqa: ANN401 - tensors, tuples of them, or None
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
