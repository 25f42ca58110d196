"""Damaged journals: reading one must neither give a changed number nor end in a traceback."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from attnbench.analysis.results import read
from attnbench.storage.events import DamagedError
from attnbench.storage.journal import JOURNAL, events, salvage
from studies.torture.trial import Trial, TrialFolder, wrong_end

Damage = Callable[[list[bytes], random.Random], list[bytes]]
LARGEST_READ = 20


def _byte(lines: list[bytes], draws: random.Random) -> list[bytes]:
    number = draws.randrange(len(lines))
    line, place = bytearray(lines[number]), draws.randrange(len(lines[number]))
    line[place] = draws.choice([each for each in range(256) if each != line[place]])
    return [*lines[:number], bytes(line), *lines[number + 1 :]]


def _digit(lines: list[bytes], draws: random.Random) -> list[bytes]:
    number = draws.randrange(len(lines))
    line = bytearray(lines[number])
    place = draws.choice([at for at, byte in enumerate(line) if chr(byte).isdigit()])
    line[place] = draws.choice([each for each in b"0123456789" if each != line[place]])
    return [*lines[:number], bytes(line), *lines[number + 1 :]]


def _gone(lines: list[bytes], draws: random.Random) -> list[bytes]:
    number = draws.randrange(len(lines) - 1)
    return [*lines[:number], *lines[number + 1 :]]


def _twice(lines: list[bytes], draws: random.Random) -> list[bytes]:
    number = draws.randrange(len(lines))
    return [*lines[: number + 1], *lines[number:]]


def _exchanged(lines: list[bytes], draws: random.Random) -> list[bytes]:
    number = draws.randrange(len(lines) - 1)
    return [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]]


def _again(lines: list[bytes], draws: random.Random) -> list[bytes]:
    return [*lines, *lines[draws.randrange(2) :]]


def _brackets(lines: list[bytes], draws: random.Random) -> list[bytes]:
    number, depth = draws.randrange(len(lines)), draws.choice([3000, 200_000])
    return [*lines[:number], b"[" * depth + b"]" * depth + b"\n", *lines[number:]]


def _noise(lines: list[bytes], draws: random.Random) -> list[bytes]:
    number = draws.randrange(len(lines))
    return [*lines[:number], draws.randbytes(200).replace(b"\n", b" ") + b"\n", *lines[number:]]


def _number(lines: list[bytes], draws: random.Random) -> list[bytes]:
    number, value = draws.randrange(len(lines)), draws.choice([b"-1", b"1e999", b"NaN", b"0", b'"1"', b"null", b"{}"])
    parts = lines[number].split(b":")
    place = draws.randrange(1, len(parts))
    end = min((at for at in (parts[place].find(each) for each in (b",", b"}", b"]")) if at >= 0), default=0)
    parts[place] = value + parts[place][end:]
    return [*lines[:number], b":".join(parts), *lines[number + 1 :]]


DAMAGES: dict[str, Damage] = {
    "one byte changed": _byte,
    "one digit changed": _digit,
    "a line gone": _gone,
    "a line twice": _twice,
    "two lines exchanged": _exchanged,
    "the journal twice over": _again,
    "nested brackets": _brackets,
    "bytes that are no text": _noise,
    "a number replaced": _number,
}


def damaged(run: Path, folder: Path, number: int, seed: int = 2) -> Iterator[Trial]:
    """Damage `number` copies of a run's journal; read and salvage each, and run `attnbench report` on the first few."""
    draws = random.Random(seed)
    whole = (run / JOURNAL).read_bytes().splitlines(keepends=True)
    intact = list(events(run / JOURNAL))
    for turn in range(number):
        name = list(DAMAGES)[turn % len(DAMAGES)]
        text = b"".join(DAMAGES[name](whole, draws))
        place = TrialFolder(folder / f"damage{turn}")
        path = place.folder / JOURNAL
        path.write_bytes(text)
        died, lost, unclear = "", "", ""
        try:
            found = list(events(path))
            read(place.folder)
            if found != intact[: len(found)]:
                lost = "it was read, and says something else"
        except DamagedError as error:
            if "journal.jsonl" not in str(error) or not ("line " in str(error) or "schema" in str(error)):
                unclear = f"no file or line: {error}"
        except Exception as error:  # noqa: BLE001 - this study looks for such errors
            died = f"{type(error).__name__}: {error}"
        try:
            saved = salvage(place.folder, place.folder / "saved")
            kept = list(events(saved.folder / JOURNAL)) if saved.is_damaged else []
            if any(each not in intact for each in kept[1:-1]):
                lost = lost or "salvaged events differ"
        except DamagedError:
            pass  # the plan is damaged: without a plan nothing can be read
        except Exception as error:  # noqa: BLE001 - this study looks for such errors
            died = died or f"salvage: {type(error).__name__}: {error}"
        if turn < LARGEST_READ:
            died = died or wrong_end(*place.run("report", str(place.folder)), due=(0, 4))
        yield Trial(subject="damaged journals", what=name, died=died, lost=lost, unclear=unclear)
