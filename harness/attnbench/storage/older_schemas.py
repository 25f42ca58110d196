"""Read journals of older schemas as if they were current: docs/adr/0003-journal.md has the history.

Lines of schema 5 end with two digests in one: of the line, and of the line after the one before it. The second is now
ignored.

Until schema 3 an arm was a name: `sdpa`, `sdpa (twin)` for the A/A control of the baseline, and `(canary)` for the
interference probe. Comparisons of two states of the code from that time cannot be read.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import msgspec

from attnbench.storage.events import Event
from attnbench.storage.records import Role

FIRST_WITH_ARMS = 4
HALF_BYTES = 6
_SCHEMA = re.compile(rb'^\{"type":"run_started","schema":(\d+),')
_CONTROL, _PROBE = " (twin)", "(canary)"


def is_old(first_line: bytes) -> bool:
    """Whether a journal with this first line has names for arms."""
    schema = _SCHEMA.match(first_line)
    return schema is not None and int(schema[1]) < FIRST_WITH_ARMS


def is_digest_right(line: bytes, digest: bytes) -> bool:
    """Whether the digest of a line of schema 5, removed from it, matches the line."""
    return digest[: 2 * HALF_BYTES] == hashlib.blake2b(line, digest_size=HALF_BYTES).hexdigest().encode()


def decoder(first_line: bytes) -> Callable[[bytes], Event]:
    """A decoder of the lines of an older journal; lines of the current schema may follow the old ones.

    It raises msgspec.DecodeError, KeyError, TypeError or AttributeError for a line that is not an event.

    Raises:
        ValueError: the run compared two states of the code.
        msgspec.DecodeError, KeyError, TypeError, AttributeError: the line holds no plan.
    """
    plan = msgspec.json.decode(first_line)["plan"]
    baseline: str = plan["baseline"]
    if plan.get("sides") is not None:
        raise ValueError("comparisons of two states of the code from before schema 4 cannot be read: repeat it")

    def decode(line: bytes) -> Event:
        raw = msgspec.json.decode(line)
        if raw["type"] == "visit_finished" and isinstance(raw["arms"], dict):
            raw["arms"] = [{"arm": _arm(name, baseline), "samples": taken} for name, taken in raw["arms"].items()]
        event: Event = msgspec.convert(raw, Event)
        return event

    return decode


def _arm(name: str, baseline: str) -> dict[str, Any]:
    """The arm of an old name."""
    if name == _PROBE:
        return {"role": Role.probe}
    is_control = name == f"{baseline}{_CONTROL}"
    return {"implementation": baseline, "role": Role.control} if is_control else {"implementation": name}
