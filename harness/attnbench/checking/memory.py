"""Unusual memory layouts of operands, incoming gradients and masks; and changed masks. Shapes as in the contract."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

GAP = 3  # number of unused numbers after each row in `gapped`, and of unused rows after the last one in `longer`


def transposed(tensor: Tensor, _: int = 1) -> Tensor:
    """Store a tensor (..., T, K) with tokens contiguous: stride 1 along T."""
    return tensor.mT.contiguous().mT


def offset(tensor: Tensor, alignment_bytes: int = 1) -> Tensor:
    """Copy a tensor into a buffer, one element or `alignment_bytes` after its start (the larger); return the view."""
    step = max(1, alignment_bytes // tensor.itemsize)
    buffer = torch.empty(tensor.numel() + step, dtype=tensor.dtype, device=tensor.device)
    return buffer[step:].view(tensor.shape).copy_(tensor)


def gapped(tensor: Tensor, alignment_bytes: int = 1) -> Tensor:
    """Store (B, H, T, K) as (B, T, H, K), with at least GAP unused numbers after each row of K numbers.

    The padded length of a row is a multiple of `alignment_bytes`.
    """
    moved = tensor.transpose(1, -2)
    step = max(1, alignment_bytes // tensor.itemsize)
    width = -(-(moved.shape[-1] + GAP) // step) * step
    wide = _unused((*moved.shape[:-1], width), tensor)
    wide[..., : moved.shape[-1]] = moved
    return wide[..., : moved.shape[-1]].transpose(1, -2)


def longer(tensor: Tensor, _: int = 1) -> Tensor:
    """Store a tensor as the first rows of a longer one, as in a cache with room for more tokens."""
    length = tensor.shape[-2]
    long = _unused((*tensor.shape[:-2], length + GAP, tensor.shape[-1]), tensor)
    long[..., :length, :] = tensor
    return long[..., :length, :]


def _unused(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Create filler that code must not read: NaN in floating-point tensors, True in boolean ones, 1 in integer ones."""
    return torch.full(shape, math.nan if like.is_floating_point() else 1, dtype=like.dtype, device=like.device)


def packed(tensors: list[Tensor], axis: int) -> list[Tensor]:
    """Store n tensors (B, H, T, K) as views of one buffer: (B, T, n, H, K) for axis 2, (B, T, H, n, K) for axis 3."""
    buffer = torch.stack([tensor.transpose(1, 2) for tensor in tensors], dim=axis)
    return [part.transpose(1, 2) for part in buffer.unbind(axis)]


def _first_keys(mask: Tensor, score: float) -> Tensor:
    """Return a bias (..., S) with `score` at the first FIRST_KEYS keys; return a boolean mask unchanged."""
    is_first = torch.arange(mask.shape[-1], device=mask.device) < FIRST_KEYS
    return mask.masked_fill(is_first, score) if mask.is_floating_point() else mask


_WRITTEN: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def _written(mask: Tensor, _: tuple[int, ...]) -> Tensor:
    """Copy a mask into a tensor that is reused for all masks of this shape, dtype and device; return that tensor."""
    return _WRITTEN.setdefault((mask.shape, mask.dtype, mask.device), torch.empty_like(mask)).copy_(mask)


LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "transposed": transposed,
    "at an offset": offset,
    "spread out in memory": gapped,
    "the first rows of longer tensors": longer,
}
"""Memory layouts by name: f(tensor, alignment in bytes) -> the same numbers in this layout."""
# Names of forms in MASK_FORMS.
OF_HEADS, OF_OTHERS = "one for each head", "one place further"
OF_TWO_AXES, TRANSPOSED_OF_TWO = "of two axes", "of two axes, transposed,"
RAISED, CONSTANT = "in float32, and larger by a constant", 2048.0
"""A constant so large that half precision has too few digits for its sum with a bias."""
WRITTEN = "written into the tensor of the call before"
ONE_ROW, COPIED_ROW = "one row for all queries", "copies of one row"
AT_INFINITY, FAR_BELOW, FIRST_KEYS = "-inf at the first keys", "-30000 at the first keys", 300
"""The first tile of any kernel has fewer than FIRST_KEYS keys; -30000 is within the range of float16."""
SAME_MASK: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "transposed": lambda mask, _: transposed(mask),
    "sliced from a wider one": lambda mask, _: gapped(mask),
    "expanded over batch rows and heads": lambda mask, sizes: mask.expand(sizes),
}
MASK_FORMS = SAME_MASK | {
    OF_TWO_AXES: lambda mask, _: mask[0, 0] if mask.shape[:2] == (1, 1) else mask,
    TRANSPOSED_OF_TWO: lambda mask, _: transposed(mask[0, 0] if mask.shape[:2] == (1, 1) else mask),
    OF_OTHERS: lambda mask, _: mask.roll(1, -1),
    OF_HEADS: lambda mask, sizes: torch.where(
        torch.arange(sizes[1], device=mask.device)[:, None, None] % 2 == 1, mask.roll(1, -1), mask
    ).expand(sizes),
    RAISED: lambda mask, _: mask.float() + CONSTANT if mask.is_floating_point() else mask,
    AT_INFINITY: lambda mask, _: _first_keys(mask, -math.inf),
    FAR_BELOW: lambda mask, _: _first_keys(mask, -3e4),
    WRITTEN: _written,
    ONE_ROW: lambda mask, _: mask[..., :1, :],
    COPIED_ROW: lambda mask, sizes: mask[..., :1, :].expand(sizes).contiguous(),
}
"""Other forms in which a function may get its mask or bias, by name: f(mask, (B, H, T, S)) -> mask. Some only
change the memory layout or dtype, or add a constant. In others each key gets the column of the key before it, the first
keys are hidden, or each query gets the row of the first query. Some code raises an error for some of these forms."""
