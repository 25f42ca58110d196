"""What one call takes and gives back, event by event, and what follows from it. Knows nothing of torch."""

import itertools
from collections.abc import Sequence

import msgspec

SLACK_BYTES = 2**23
"""What a call may take beyond what is counted: buffers inside libraries, and rests of the heap."""
MOST_EVENTS = 2000
"""Of a timeline that is passed on: a picture is not wider."""


class MemoryEvent(msgspec.Struct, frozen=True, array_like=True):
    """One allocation, or, with a negative number, one release, and the operator that was running."""

    num_bytes: int
    operator: str = ""  # "": none; Python itself let go of a tensor, or made a number into one


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one call in order. Where there are too many, stretches of them are drawn together."""

    events: tuple[MemoryEvent, ...]
    num_events: int  # that there were

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return max(0, *held(self.events), 0)


def held(events: Sequence[MemoryEvent]) -> list[int]:
    """The bytes that are held after each event."""
    return list(itertools.accumulate(event.num_bytes for event in events))


def largest(events: Sequence[MemoryEvent], number: int) -> list[int]:
    """The places of the largest allocations, at most `number`, in the order of time."""
    taken = [place for place, event in enumerate(events) if event.num_bytes > 0]
    return sorted(sorted(taken, key=lambda place: -events[place].num_bytes)[:number])


def timeline(events: Sequence[MemoryEvent], most: int = MOST_EVENTS) -> Timeline:
    """All the events, or, where there are more than `most`, each stretch of them as its rise to its top and its rest.

    Neither the peak nor what is held at the end changes by that; an event carries the operator of the largest
    allocation that it stands for.
    """
    if len(events) <= most:
        return Timeline(events=tuple(events), num_events=len(events))
    size = -(-2 * len(events) // most)
    stretches = (events[start : start + size] for start in range(0, len(events), size))
    drawn = [event for stretch in stretches for event in _drawn_together(stretch)]
    return Timeline(events=tuple(drawn), num_events=len(events))


def _drawn_together(stretch: Sequence[MemoryEvent]) -> list[MemoryEvent]:
    levels = held(stretch)
    top = max(range(len(levels)), key=levels.__getitem__) + 1
    return [
        MemoryEvent(sum(event.num_bytes for event in part), max(part, key=lambda event: event.num_bytes).operator)
        for part in (stretch[:top], stretch[top:])
        if part
    ]
