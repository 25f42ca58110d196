"""Several masks at once, written with + between them: `causal+softcap(20)`, `causal+padding`."""

import functools
import operator
from typing import Any

import numpy as np

from attnbench.workloads.masks.rule import Array, Mask, Span, Table

BETWEEN = "+"


class Combined(Mask):
    """A key is visible where every part shows it; scores are changed part by part, left to right, before any is hidden.

    Hiding commutes, so the parts that hide come first in its text, in the order of the alphabet.
    """

    usage = "mask+mask, or more"
    summary = "visible is what every part shows; scores are changed from left to right, before keys are hidden"

    def __init__(self, *parts: Mask) -> None:
        """Join two parts or more.

        Raises:
            ValueError: `none` among the parts, or one mask twice.
        """
        self._parts = (
            *sorted((part for part in parts if not part.changes_scores), key=str),
            *(part for part in parts if part.changes_scores),
        )
        names = [part.name for part in self._parts]
        self.name = BETWEEN.join(names)
        super().__init__()
        self.summary = "; ".join(part.summary for part in self._parts)
        self.changes_scores = any(part.changes_scores for part in self._parts)
        self.is_additive = all(part.is_additive for part in self._parts)
        if Mask.name in names:
            raise ValueError(f"mask={self} is not allowed: {Mask.name} hides nothing, leave it out")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"mask={self} is not allowed: {', '.join(twice)} stands there twice, give it once")

    def __str__(self) -> str:
        """The text that `parse_mask` reads back."""
        return BETWEEN.join(map(str, self._parts))

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Those that hide, then those that change scores."""
        return self._parts

    @property
    def hides(self) -> bool:
        """Whether a part does."""
        return any(part.hides for part in self._parts)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:
        """Each part's."""
        for part in self._parts:
            part.check(batch_size, query_len, key_len)

    def table(self, batch_size: int, query_len: int, key_len: int) -> Table:
        """Each part's."""
        return tuple(part.table(batch_size, query_len, key_len) for part in self._parts)

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401
        """What every part that hides shows."""
        parts = [(part, own) for part, own in zip(self._parts, table, strict=True) if part.hides]
        if not parts:
            return super().sees(batch, query, key, None, offset)
        return functools.reduce(operator.and_, (part.sees(batch, query, key, own, offset) for part, own in parts))

    def span(self, batch_size: int, query_len: int, key_len: int) -> Span | None:
        """The overlap of spans is a span."""
        spans = [part.span(batch_size, query_len, key_len) for part in self._parts]
        known = [span for span in spans if span is not None]
        if len(known) < len(spans):
            return None
        firsts, ends = zip(*known, strict=True)
        return functools.reduce(np.maximum, firsts), functools.reduce(np.minimum, ends)

    def at_other_length(self) -> Mask:
        """Each part's."""
        return Combined(*(part.at_other_length() for part in self._parts))
