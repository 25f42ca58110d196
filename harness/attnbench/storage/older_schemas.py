"""Read journals of older schemas as if they were current: docs/adr/0003-journal.md has the history.

Lines of schema 5 end with two digests in one: of the line, and of the line after the one before it. The second is now
ignored.

Until schema 3 an arm was a name: `sdpa`, `sdpa (twin)` for the A/A control, `(canary)` for the interference probe, and
`sdpa (base)` for an implementation on the base of two sides.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import msgspec

from attnbench.plugins import name_of
from attnbench.storage.events import Event
from attnbench.storage.records import BASE, CANDIDATE, Role

FIRST_WITH_ARMS = 4  # schema
HALF_BYTES = 6
_SCHEMA = re.compile(rb'^\{"type":"run_started","schema":(\d+),')
_CONTROL, _BASE, _PROBE = " (twin)", " (base)", "(canary)"


def is_digest_right(line: bytes, digest: bytes) -> bool:
    """Whether the digest of a line of schema 5, removed from it, matches the line."""
    return digest[: 2 * HALF_BYTES] == hashlib.blake2b(line, digest_size=HALF_BYTES).hexdigest().encode()


def decoder(first_line: bytes) -> Callable[[bytes], Event] | None:
    """A decoder of the lines of a journal with names for arms; None if this first line is of a newer one.

    Lines of the current schema may follow the old ones. The decoder raises the same errors for a line that is no event.

    Raises:
        msgspec.DecodeError, KeyError, TypeError, AttributeError: the line holds no plan.
    """
    schema = _SCHEMA.match(first_line)
    if schema is None or int(schema[1]) >= FIRST_WITH_ARMS:
        return None
    plan = msgspec.json.decode(first_line)["plan"]
    baseline, sides = plan["baseline"], plan.get("sides")

    def arm_of(name: str) -> dict[str, Any]:
        """The arm of an old name: its implementation and role, and its side if there are sides."""
        if name == _PROBE:
            return {"role": Role.probe}
        bare = name.removesuffix(_CONTROL)
        has_control = bare == baseline if sides is None else bare.endswith(_BASE) or sides.get("is_apart", False)
        is_control = bare != name and has_control
        implementation, role = (bare, Role.control) if is_control else (name, Role.measured)
        if sides is None:
            return {"implementation": implementation, "role": role}
        side = BASE if implementation.endswith(_BASE) else CANDIDATE
        return {"implementation": implementation.removesuffix(_BASE), "role": role, "side": side}

    def decode(line: bytes) -> Event:
        raw = msgspec.json.decode(line)
        if raw["type"] == "visit_finished" and isinstance(raw["arms"], dict):
            raw["arms"] = [{"arm": arm_of(name), "samples": taken} for name, taken in raw["arms"].items()]
        elif raw["type"] == "run_started" and sides is not None:
            new, specs = raw["plan"], raw["plan"]["implementations"]
            for side in (BASE, CANDIDATE):
                new["sides"][side]["implementations"] = {
                    arm["implementation"]: spec.partition("=")[2] or spec
                    for spec in specs
                    if (arm := arm_of(name_of(spec)))["side"] == side
                }
            new["implementations"], new["baseline"] = [], ""
        elif "implementation" in raw and "side" not in raw and sides is not None:
            arm = arm_of(raw["implementation"])
            raw["implementation"], raw["side"] = arm["implementation"], arm["side"]
        event: Event = msgspec.convert(raw, Event)
        return event

    return decode
