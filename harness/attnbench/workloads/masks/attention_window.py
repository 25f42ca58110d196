"""Masks that are a band around the diagonal, as FlashAttention and its kin take them: a pair (left, right)."""

from attnbench.workloads.masks import Causal, CausalBottomRight, Mask, SlidingWindow

UNLIMITED = -1


def band(rule: Mask, query_len: int, key_len: int) -> tuple[int, int] | None:
    """(left, right), or None where the rule is no such band.

    Query i sees keys i + S - T - left to i + S - T + right, counted from the end (bottom-right); -1 is no limit. So
    what is aligned at the start (top-left) is a band only where both lengths are the same.

    Source: https://github.com/Dao-AILab/flash-attention, README, changes in 2.1 and 2.3
    """
    if type(rule) is Mask:
        return UNLIMITED, UNLIMITED
    if isinstance(rule, CausalBottomRight) or (isinstance(rule, Causal) and query_len == key_len):
        return UNLIMITED, 0
    if isinstance(rule, SlidingWindow) and query_len == key_len:
        return rule.arguments[0] - 1, 0
    return None


def no_band(rule: Mask, query_len: int, key_len: int) -> str | None:
    """Why a kernel that takes bands alone cannot take this mask, in words, or None."""
    if band(rule, query_len, key_len) is not None:
        return None
    if query_len != key_len:
        return f"the kernel counts mask {rule} from the last key: it needs kv_len == seq_len"
    return f"the kernel takes no mask {rule}, only none, causal and sliding windows"
