"""Masks by the positions of query and key: causal, windows, a prefix.

Where T and S differ, a query's position may be counted from the start (top-left, as in `is_causal` of
scaled_dot_product_attention) or from the end (bottom-right, as decoding with a cache needs it). Each is a mask.
"""

from typing import Any

import numpy as np

from attnbench.workloads.masks.rule import Array, Mask, Span, Table


class Causal(Mask):
    """Query i sees keys 0 to i, counted from the start: top-left alignment."""

    name = "causal"
    summary = "query i sees keys 0..i, aligned at the start (top-left)"
    usage = "causal"

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401, ARG002
        """Up to its own position."""
        return key <= query

    def span(self, batch_size: int, query_len: int, key_len: int) -> Span:  # noqa: ARG002
        """From the first key."""
        return 0, np.arange(query_len) + 1


class CausalBottomRight(Mask):
    """The last query sees every key: bottom-right alignment, as in decoding with a cache."""

    name = "causal_bottom_right"
    summary = "query i sees keys 0..i+S-T, aligned at the end (bottom-right)"
    usage = "causal_bottom_right"

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401, ARG002
        """Up to its own position counted from the end."""
        return key <= query + offset

    def span(self, batch_size: int, query_len: int, key_len: int) -> Span:  # noqa: ARG002
        """From the first key; the first T - S queries see nothing."""
        return 0, np.arange(query_len) + key_len - query_len + 1


class SlidingWindow(Mask):
    """Query i sees its own position and the n - 1 before it, counted from the start."""

    name = "sliding_window"
    summary = "query i sees keys i-n+1..i, aligned at the start (top-left)"
    usage = "sliding_window(n), n at least 1"
    num_arguments = (1, 1)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:  # noqa: ARG002
        """A window of 0 would see nothing."""
        if self.arguments[0] < 1:
            raise ValueError(f"mask={self} is not allowed: write it as {self.usage}")

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401, ARG002
        """The last n positions up to its own."""
        return (key <= query) & (query - self.arguments[0] < key)

    def span(self, batch_size: int, query_len: int, key_len: int) -> Span:  # noqa: ARG002
        """Queries more than a window past the last key see nothing."""
        own = np.arange(query_len)
        return own + 1 - self.arguments[0], own + 1


class SlidingWindowBottomRight(SlidingWindow):
    """The same counted from the end, as in decoding: the last query sees the last n keys."""

    name = "sliding_window_bottom_right"
    summary = "query i sees keys i+S-T-n+1..i+S-T, aligned at the end (bottom-right)"
    usage = "sliding_window_bottom_right(n), n at least 1"

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401
        """The last n positions up to its own counted from the end."""
        return super().sees(batch, query + offset, key, table, offset)

    def span(self, batch_size: int, query_len: int, key_len: int) -> Span:  # noqa: ARG002
        """The first T - S queries see nothing."""
        own = np.arange(query_len) + key_len - query_len
        return own + 1 - self.arguments[0], own + 1


class Prefix(Mask):
    """A prefix that all queries see, causal after it (prefix language model)."""

    name = "prefix"
    summary = "every query sees the first n keys, and keys up to its own position"
    usage = "prefix(n)"
    num_arguments = (1, 1)

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401, ARG002
        """The prefix, or up to its own position."""
        return (key < self.arguments[0]) | (key <= query)

    def span(self, batch_size: int, query_len: int, key_len: int) -> Span:  # noqa: ARG002
        """Row i has max(n, i + 1) keys."""
        return 0, np.maximum(self.arguments[0], np.arange(query_len) + 1)


UNLIMITED = -1


def attention_window(mask: Mask, query_len: int, key_len: int) -> tuple[int, int] | None:
    """The mask as a window (left, right) around the diagonal, as FlashAttention takes it; None where it is none.

    Query i sees keys i + S - T - left to i + S - T + right, counted from the end (bottom-right); -1 is no limit. So
    what is aligned at the start (top-left) is a window only where both lengths are the same.

    Source: https://github.com/Dao-AILab/flash-attention, README, changes in 2.1 and 2.3
    """
    if type(mask) is Mask:
        return UNLIMITED, UNLIMITED
    if isinstance(mask, CausalBottomRight) or (isinstance(mask, Causal) and query_len == key_len):
        return UNLIMITED, 0
    if isinstance(mask, SlidingWindow) and query_len == key_len:
        return mask.arguments[0] - 1, 0
    return None


def not_a_window(mask: Mask, query_len: int, key_len: int) -> str | None:
    """Why a kernel that takes windows only cannot take this mask, in words, or None."""
    if attention_window(mask, query_len, key_len) is not None:
        return None
    if query_len != key_len:
        return f"the kernel counts mask {mask} from the last key: it needs kv_len == seq_len"
    return f"the kernel takes no mask {mask}, only none, causal and sliding windows"
