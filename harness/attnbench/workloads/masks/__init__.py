"""Masks: which keys each query sees, how they change scores, and how many pairs are visible, exactly. Without torch.

A mask is one class, in the file of its family. Its rules use only operators that numpy arrays and torch tensors share,
so that the dense form, a single tile and a compiled kernel's predicate all come from the same line
(docs/adr/0002-mask-is-a-rule.md).
"""

import re
from collections.abc import Iterator

from attnbench.workloads.masks.combined import BETWEEN, Combined
from attnbench.workloads.masks.drawn import Additive, Boolean
from attnbench.workloads.masks.lengths import Document, Padding, PaddingToNothing
from attnbench.workloads.masks.positions import (
    Causal,
    CausalBottomRight,
    Prefix,
    SlidingWindow,
    SlidingWindowBottomRight,
    attention_window,
    not_a_window,
)
from attnbench.workloads.masks.rule import Array, Mask, Span, Table
from attnbench.workloads.masks.scores import Alibi, AlibiBottomRight, Softcap

__all__ = [
    "Additive",
    "Alibi",
    "AlibiBottomRight",
    "Array",
    "Boolean",
    "Causal",
    "CausalBottomRight",
    "Combined",
    "Document",
    "Mask",
    "Padding",
    "PaddingToNothing",
    "Prefix",
    "SlidingWindow",
    "SlidingWindowBottomRight",
    "Softcap",
    "Span",
    "Table",
    "attention_window",
    "masks",
    "not_a_window",
    "parse_mask",
]


def masks() -> dict[str, type[Mask]]:
    """Every mask that has a name of its own: `none`, then the others in the order of the alphabet."""
    found = {mask.name: mask for mask in _family(Mask) if mask is not Combined}
    return {name: found[name] for name in sorted(found, key=lambda name: (name != Mask.name, name))}


def _family(base: type[Mask]) -> Iterator[type[Mask]]:
    yield base
    for child in base.__subclasses__():
        yield from _family(child)


def parse_mask(text: str) -> Mask:
    """The mask that `name`, `name(number,number,...)` or several of these with + between them describe.

    Raises:
        ValueError: an unknown name or arguments that do not fit; the message lists what is allowed.
    """
    parts = [_parse_part(part, text) for part in text.split(BETWEEN)]
    return parts[0] if len(parts) == 1 else Combined(*parts)


def _parse_part(part: str, text: str) -> Mask:
    found = re.fullmatch(r"\s*([a-z_]+)\s*(?:\(([\d\s,]*)\))?\s*", part)
    known = masks()
    if found is None or found[1] not in known:
        allowed = "; ".join([*(mask.usage for mask in known.values()), Combined.usage])
        culprit = "" if part == text else f" (its part {part.strip() or 'before or after a +, which is empty'})"
        raise ValueError(f"mask={text} is not allowed{culprit}: mask is one of {allowed}")
    numbers = [number for number in (found[2] or "").replace(" ", "").split(",") if number]
    return known[found[1]](*map(int, numbers))
