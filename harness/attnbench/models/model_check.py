"""Checks inside a model run in a process of their own: one that dies costs only the attention that it was trying."""

from collections.abc import Callable

import msgspec

from attnbench.models.events import AnyEvent, Asked, Built, Impossible, Judged, Timed, Trying
from attnbench.processes.lines import Ended, lines

MODULE = "attnbench.models.process"
Say = Callable[[AnyEvent], object]


class Outcome(msgspec.Struct, kw_only=True):
    """All that was found out."""

    built: Built | None = None
    judged: dict[str, Judged] = {}
    timed: list[Timed] = []
    trouble: str = ""  # why nothing was timed, where something agreed


def run(asked: Asked, say: Say, timeout_s: float) -> Outcome:
    """Ask until every attention is judged; a process that dies or hangs is started again without its culprit.

    Raises:
        ValueError: there is no model for the configuration, or it cannot be built.
    """
    found = Outcome()

    def limit_of(event: AnyEvent | None) -> float:
        is_timing = isinstance(event, Trying) and event.step == "timing"
        return timeout_s + is_timing * asked.budget_s

    while True:
        right = tuple(name for name, each in found.judged.items() if each.is_right)
        again = msgspec.structs.replace(asked, checked=tuple(found.judged), timed=right)
        last, ended = Trying(step="building"), Ended()
        for event in lines(MODULE, again, AnyEvent, ended, limit_of):
            say(event)
            match event:
                case Built():
                    found.built = event
                case Judged():
                    found.judged[event.attention] = event
                case Timed():
                    found.timed.append(event)
                case Trying():
                    last = event
                case Impossible():
                    raise ValueError(event.reason)
        if not ended.reason:
            return found
        if last.step == "building":
            raise ValueError(f"the model cannot be built: {ended.reason}")
        if last.step == "timing":
            found.trouble = ended.reason
            return found
        found.judged[last.attention] = Judged(attention=last.attention, reason=ended.reason)
