"""Explanations of the names on screens and in JSON, read from the files explained.toml.

Each of these files lies next to the code that uses its names. Its tables are grouped by kind. In a table, `means` has
the meaning of each name; the reason (`why`), the example and the advice (`do`) apply to all names in the table. `also`
has other spellings of a name. `declare` has the argument of `adapt` that declares a behaviour as intended. A `*` in a
name stands for any text, such as the name of an operand.
"""

import functools
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

FILES = "explained.toml"
KINDS = {
    "verdict": "Verdicts on an answer",
    "speed": "Verdicts on a time",
    "reason": "Why a time is undecided",
    "payoff": "When a first call has paid",
    "ending": "How a command ends",
    "status": "How a cell ended",
    "warning": "Warnings",
    "convention": "Conventions that a check accepts",
    "rule": "Rules and notes of a check",
    "probe": "Inputs of a check",
    "mistake": "Known mistakes",
    "gate": "Rulings of the gate",
    "screen": "Words of the closing screen",
}
"""The title of each kind, in the order in which the kinds are listed."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The explanation of one name: what it means, why it matters, an example, and what to do."""

    name: str
    kind: str
    means: str
    why: str
    example: str
    do: str
    also: tuple[str, ...] = ()
    declare: str = ""


@functools.cache
def explanations() -> tuple[Explanation, ...]:
    """Read all explanations, sorted by kind in the order of KINDS."""
    found = list[Explanation]()
    for file in sorted(Path(__file__).parent.rglob(FILES)):
        content: dict[str, list[dict[str, Any]]] = msgspec.toml.decode(file.read_bytes())
        for kind, groups in content.items():
            for group in groups:
                shared = {name: group[name] for name in ("why", "example", "do")}
                also, declare = (group.get(key, {}) for key in ("also", "declare"))
                for name, means in group["means"].items():
                    more = {"also": tuple(also.get(name, ())), "declare": declare.get(name, "")}
                    found.append(Explanation(name=name, kind=kind, means=means, **more, **shared))
    return tuple(sorted(found, key=lambda each: list(KINDS).index(each.kind)))


def explained(name: str) -> list[Explanation]:
    """Find the explanations of a name: usually one, or several if the name exists in several kinds.

    The search ignores case, and treats an underscore like a space.

    Raises:
        ValueError: there is no such name; the message suggests similar ones.
    """
    plain = _plain(name)
    if found := [each for each in explanations() if plain in map(_plain, (each.name, *each.also))]:
        return found
    if found := [each for each in explanations() if "*" in each.name and fnmatchcase(plain, _plain(each.name))]:
        return found[:1]
    near = get_close_matches(name, sorted({each.name for each in explanations()}), n=3)
    guess = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise ValueError(f"there is no explanation of {name}{guess}; to list all names, run attnbench explain")


def _plain(name: str) -> str:
    """Return a name in lower case, with single spaces instead of underscores."""
    return " ".join(name.lower().replace("_", " ").split())
