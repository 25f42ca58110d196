"""What memory one call allocates and releases, event by event. Knows nothing of torch."""

import msgspec

SLACK_BYTES = 2**23
"""What a call may take beyond what is counted: buffers inside libraries, and leftovers of the heap."""
SHARE_OF_FREE = 0.75
"""What a call may take where no limit is given."""


class MemoryEvent(msgspec.Struct, frozen=True, array_like=True):
    """One allocation, or, with a negative number, one release, and the operator that was running."""

    num_bytes: int
    operator: str = ""  # "": none; Python itself released a tensor, or made a number into one
