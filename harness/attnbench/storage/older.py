"""Convert the journal of an older version: `attnbench report` does it once, and nothing else reads old journals.

Until schema 3 an arm was a name: `sdpa`, `sdpa (twin)` for a second sample of the baseline, `(canary)` for the
interference probe, and `sdpa (base)` for an implementation on the base of two sides. Until schema 5 lines had no
numbers. The second samples are left out, because nothing uses them any more.
"""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from attnbench.plugins import name_of
from attnbench.storage.events import SCHEMA, DamagedError, Event, RunStarted
from attnbench.storage.files import write_atomically
from attnbench.storage.fold import State
from attnbench.storage.journal import NO_EVENT, lines_of, schema_of, signed
from attnbench.storage.records import BASE, CANDIDATE, Role

FIRST_WITH_ARMS = 4  # first schema in which an arm is an `Arm`
SECOND, OF_BASE, PROBE = " (twin)", " (base)", "(canary)"
SIGNATURE = re.compile(rb'(?:,"seq":\d+)?,"digest":"\w+"\}$')


def convert(journal: Path) -> bool:
    """Rewrite a journal of an older schema in the present one; return whether it was older.

    The old file is kept next to the new one, with `.old` at the end of its name.

    Raises:
        ValueError: the file cannot be read.
        DamagedError: a line is damaged, or contradicts earlier ones.
        OSError: the file cannot be written.
    """
    lines = lines_of(journal)
    if not lines or schema_of(lines[0]) >= SCHEMA:
        return False
    signed_lines = b"".join(signed(event, number) for number, event in enumerate(_events(journal, lines), start=1))
    write_atomically(journal.with_name(f"{journal.name}.old"), journal.read_bytes())
    write_atomically(journal, gzip.compress(signed_lines, mtime=0) if journal.suffix == ".gz" else signed_lines)
    return True


def _events(journal: Path, lines: list[bytes]) -> Iterator[Event]:
    """Yield the events of an old journal's lines as events of the present schema."""
    state, names = State(), _Names("", None)
    for number, line in enumerate(lines, start=1):
        try:
            raw = msgspec.json.decode(SIGNATURE.sub(b"}", line))
            if number == 1 and raw["schema"] < FIRST_WITH_ARMS:
                names = _Names(raw["plan"]["baseline"], raw["plan"].get("sides"))
            event: Event = msgspec.convert(names.converted(raw), Event)
        except NO_EVENT as error:
            raise DamagedError(f"{journal}, line {number}: not an event of a journal ({error})") from None
        if isinstance(event, RunStarted):
            event = msgspec.structs.replace(event, schema=SCHEMA)
        if wrong := state.problem(event):
            raise DamagedError(f"{journal}, line {number}: {wrong}")
        state.apply(event)
        yield event


class _Names:
    """Converts the names of arms in a journal with this baseline and these sides (compared states of the code).

    Later lines of the journal may already have arms instead of names.
    """

    def __init__(self, baseline: str, sides: dict[str, Any] | None) -> None:
        self.baseline, self.sides = baseline, sides

    def arm(self, name: str) -> dict[str, Any] | None:
        """Convert a name to the fields of an `Arm`; None for the second samples of a baseline."""
        if name == PROBE:
            return {"role": Role.probe}
        bare, sides = name.removesuffix(SECOND), self.sides
        has_second = bare == self.baseline if sides is None else bare.endswith(OF_BASE) or sides.get("is_apart", False)
        if bare != name and has_second:
            return None
        if sides is None:
            return {"implementation": name}
        side = BASE if name.endswith(OF_BASE) else CANDIDATE
        return {"implementation": name.removesuffix(OF_BASE), "side": side}

    def converted(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Convert the fields of an event.

        Raises:
            KeyError, TypeError, AttributeError: it is no event.
        """
        if raw["type"] == "visit_finished":
            arms = raw["arms"]
            if isinstance(arms, dict):
                arms = [{"arm": self.arm(name), "samples": samples} for name, samples in arms.items()]
            raw["arms"] = [each for each in arms if each["arm"] is not None and each["arm"].get("role") != "control"]
        elif raw["type"] == "run_started" and self.sides is not None:
            plan, specs = raw["plan"], raw["plan"]["implementations"]
            named = [(self.arm(name_of(spec)), spec.partition("=")[2] or spec) for spec in specs]
            for side in (BASE, CANDIDATE):
                of_side = {arm["implementation"]: spec for arm, spec in named if arm and arm["side"] == side}
                plan["sides"][side]["implementations"] = of_side
            plan["implementations"], plan["baseline"] = [], ""
        elif "implementation" in raw and "side" not in raw and self.sides is not None:
            raw |= self.arm(raw["implementation"]) or {}
        return raw
