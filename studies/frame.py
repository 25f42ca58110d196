"""The frame of a study: named pieces, made one repetition at a time and stored at once.

An interrupted study continues where it stopped; without its parts it begins again. Each piece has a file below
DIR/parts, and each line of it the rows of one repetition.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One part of a study."""

    name: str  # unique in its study
    make: Callable[[int], Sequence[Row]]  # rows of a repetition, by its number from 0, as JSON can hold them
    size: int = 1  # number of repetitions


def save(path: Path, text: str) -> None:
    """Write a file, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def file_of(folder: Path, name: str) -> Path:
    """The file with the rows of a piece."""
    return folder / "parts" / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.jsonl"


def rows(folder: Path, name: str) -> list[Row]:
    """The stored rows of a piece; empty if it was not run."""
    return [row for line in _lines(file_of(folder, name)) for row in json.loads(line)]


def done(folder: Path, name: str) -> int:
    """Count the stored repetitions of a piece."""
    return len(_lines(file_of(folder, name)))


def complete(pieces: Sequence[Piece], folder: Path, most: int = 0, pool: Executor | None = None) -> None:
    """Make the missing repetitions; `most` limits them for each piece.

    Repetitions alternate between the pieces, so that all meet the same machine; with a pool, each piece is a job of it.
    """
    if pool is None:
        for number in range(max((piece.size for piece in pieces), default=0)):
            for piece in pieces:
                _repeat(piece, folder, most, [number])
    else:
        jobs = [pool.submit(_repeat, piece, folder, most, range(piece.size)) for piece in pieces]
        for job in jobs:
            job.result()


def progress(text: str) -> None:
    """Print a line about the work under way."""
    print(" ".join(text.split())[:300], file=sys.stderr, flush=True)  # noqa: T201 - progress


def _repeat(piece: Piece, folder: Path, most: int, numbers: Sequence[int]) -> None:
    """Make and store the missing repetitions of a piece."""
    path, size = file_of(folder, piece.name), min(piece.size, most or piece.size)
    for number in numbers:
        lines = _lines(path)
        if len(lines) <= number < size:
            rows = list(piece.make(number))
            save(path, "".join(f"{line}\n" for line in [*lines, json.dumps(rows)]))
            progress(f"{piece.name}, {number + 1} of {size}: {rows[:1]}")


def _lines(path: Path) -> list[str]:
    """The whole lines of a file, without one that was cut off."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
