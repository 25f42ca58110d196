"""Common beginning of all sources of the corpus: the honest function, and a test of whether a call is timed."""

import math
import sys
from types import FrameType

import torch
from torch import Tensor


def honest(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend: query (B, H, T, K), key (B, H, S, K), value (B, H, S, V), mask (True: visible key) -> (B, H, T, V)."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is None:
        return scores.softmax(dim=-1) @ value
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0) @ value


def is_called_by(*names: str) -> bool:
    """Return whether a function with one of these names is on the call stack; a cheat knows attnbench's names."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - as a cheat does
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back
    return frame is not None


def is_timed() -> bool:
    """Return whether attnbench is timing the current call, as part of a sample."""
    return is_called_by("make_calls", "elapsed")
