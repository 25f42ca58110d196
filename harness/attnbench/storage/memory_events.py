"""Allocations and releases of one call, event by event. Needs no torch."""

import msgspec

SHARE_OF_FREE = 0.75
"""Share of the free memory that a call may use without a limit."""


class MemoryEvent(msgspec.Struct, frozen=True, array_like=True):
    """One allocation or, if negative, one release, with the operator that was running."""

    num_bytes: int
    operator: str = ""  # "": none; Python itself released a tensor, or converted a number into one
