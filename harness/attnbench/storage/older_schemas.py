"""Read journals of older schemas as if they were current: docs/adr/0003-journal.md has the history.

Lines of schema 5 end with two digests in one: of the line, and of the line after the one before it. The second is now
ignored.

Until schema 3 an arm was a name: `sdpa`, `sdpa (twin)` for the A/A control, `(canary)` for the interference probe, and
`sdpa (base)` for an implementation on the base of two sides.
"""

import hashlib
import re
from typing import Any

import msgspec

from attnbench.plugins import name_of
from attnbench.storage.events import Event
from attnbench.storage.records import BASE, CANDIDATE, Role

FIRST_WITH_ARMS = 4
HALF_BYTES = 6
_SCHEMA = re.compile(rb'^\{"type":"run_started","schema":(\d+),')
_CONTROL, _BASE, _PROBE = " (twin)", " (base)", "(canary)"


def is_old(first_line: bytes) -> bool:
    """Whether a journal with this first line has an older schema."""
    schema = _SCHEMA.match(first_line)
    return schema is not None and int(schema[1]) < FIRST_WITH_ARMS


def is_digest_right(line: bytes, digest: bytes) -> bool:
    """Whether the digest of a line of schema 5, removed from it, matches the line."""
    return digest[: 2 * HALF_BYTES] == hashlib.blake2b(line, digest_size=HALF_BYTES).hexdigest().encode()


class Upgrade:
    """Decoder of one older journal; lines of the current schema may follow the old ones."""

    def __init__(self, first_line: bytes) -> None:
        """Read the meaning of arm names from the plan.

        Raises:
            msgspec.DecodeError, KeyError, TypeError, AttributeError: the line holds no plan.
        """
        plan = msgspec.json.decode(first_line)["plan"]
        self.has_sides = plan.get("sides") is not None
        self.is_apart = self.has_sides and plan["sides"].get("is_apart", False)
        self.baseline = plan["baseline"]

    def decode(self, line: bytes) -> Event:
        """Decode a line.

        Raises:
            msgspec.DecodeError, KeyError, TypeError, AttributeError: the line is not an event.
        """
        raw = msgspec.json.decode(line)
        if raw["type"] == "run_started" and self.has_sides:
            plan, sides = raw["plan"], raw["plan"]["sides"]
            sides[BASE]["implementations"], sides[CANDIDATE]["implementations"] = {}, {}
            for spec in plan["implementations"]:
                arm = self._arm(name_of(spec))
                sides[arm["side"]]["implementations"][arm["implementation"]] = spec.partition("=")[2] or spec
            plan["implementations"], plan["baseline"] = [], ""
        elif raw["type"] == "visit_finished" and isinstance(raw["arms"], dict):
            raw["arms"] = [{"arm": self._arm(name), "samples": taken} for name, taken in raw["arms"].items()]
        elif "implementation" in raw and "side" not in raw and self.has_sides:
            raw |= {name: value for name, value in self._arm(raw["implementation"]).items() if name != "role"}
        event: Event = msgspec.convert(raw, Event)
        return event

    def _arm(self, name: str) -> dict[str, Any]:
        """The arm of an old name."""
        if name == _PROBE:
            return {"role": Role.probe}
        bare = name.removesuffix(_CONTROL)
        is_base = bare.endswith(_BASE) if self.has_sides else bare == self.baseline
        is_control = bare != name and (is_base or self.is_apart)
        implementation = bare if is_control else name
        arm: dict[str, Any] = {"role": Role.control if is_control else Role.measured}
        if not self.has_sides:
            return arm | {"implementation": implementation}
        side = BASE if implementation.endswith(_BASE) else CANDIDATE
        return arm | {"implementation": implementation.removesuffix(_BASE), "side": side}
