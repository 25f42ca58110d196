"""Allocations and releases of one call, event by event. Knows nothing of torch."""

import msgspec

SLACK_BYTES = 2**23
"""Memory of a call that is not counted: buffers inside libraries, and leftovers of the heap."""
SHARE_OF_FREE = 0.75
"""Share of the free memory for a call without a limit."""


class MemoryEvent(msgspec.Struct, frozen=True, array_like=True):
    """One allocation, or, with a negative number, one release, and the operator that was running."""

    num_bytes: int
    operator: str = ""  # "": none; Python itself released a tensor, or made a number into one
