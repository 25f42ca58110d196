"""What memory one call allocates and releases, event by event. Knows nothing of torch."""

import heapq
import itertools
from collections.abc import Sequence

import msgspec

SLACK_BYTES = 2**23
"""What a call may take beyond what is counted: buffers inside libraries, and leftovers of the heap."""
SHARE_OF_FREE = 0.75
"""What a call may take where no limit is given."""
MOST_EVENTS = 2000
"""Of a timeline: no picture is wider."""


class MemoryEvent(msgspec.Struct, frozen=True, array_like=True):
    """One allocation, or, with a negative number, one release, and the operator that was running."""

    num_bytes: int
    operator: str = ""  # "": none; Python itself released a tensor, or made a number into one


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one call in order. Where there are too many, neighbours are merged."""

    events: tuple[MemoryEvent, ...]
    num_events: int  # that there were

    @property
    def peak_bytes(self) -> int:
        """The most that is held at any moment."""
        return max(0, *held(self.events), 0)


def held(events: Sequence[MemoryEvent]) -> list[int]:
    """The bytes that are held after each event."""
    return list(itertools.accumulate(event.num_bytes for event in events))


def largest(events: Sequence[MemoryEvent], number: int) -> list[int]:
    """The indices of the largest allocations, at most `number`, in the order of time."""
    allocations = [index for index, event in enumerate(events) if event.num_bytes > 0]
    return sorted(heapq.nlargest(number, allocations, key=lambda index: events[index].num_bytes))


def timeline(events: Sequence[MemoryEvent], most: int = MOST_EVENTS) -> Timeline:
    """All the events, or, where there are more than `most`, each stretch of them as its rise to its top and its rest.

    Neither the peak nor what is held at the end changes by that; an event carries the operator of the largest
    allocation that it stands for.
    """
    merged = list(events)
    if len(events) > most:
        size = -(-2 * len(events) // most)
        merged = []
        for stretch in (events[start : start + size] for start in range(0, len(events), size)):
            levels = held(stretch)
            top = levels.index(max(levels)) + 1
            for part in filter(None, (stretch[:top], stretch[top:])):
                operator = max(part, key=lambda event: event.num_bytes).operator
                merged.append(MemoryEvent(sum(event.num_bytes for event in part), operator))
    return Timeline(events=tuple(merged), num_events=len(events))
