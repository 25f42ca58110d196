"""The common frame of studies: a study has named pieces, and each repetition of a piece is stored when it ends.

An interrupted study therefore continues where it stopped. Each piece has a file in the study's folder `parts`, and each
line of the file holds the rows of one repetition. To repeat a study from the beginning, delete the folder `parts`.
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
    """One part of a study, which is repeated `size` times."""

    name: str  # unique in its study
    make: Callable[[int], Sequence[Row]]  # takes a repetition's number (from 0), returns its rows, fit for JSON
    size: int = 1  # number of repetitions


def save(path: Path, text: str) -> None:
    """Write a file and create its folder; a crash leaves the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def file_of(folder: Path, name: str) -> Path:
    """Return the path of the file with the rows of a piece."""
    return folder / "parts" / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.jsonl"


def rows(folder: Path, name: str) -> list[Row]:
    """Load the stored rows of all repetitions of a piece; empty if it was not run."""
    return [row for line in _lines(file_of(folder, name)) for row in json.loads(line)]


def done(folder: Path, name: str) -> int:
    """Count the stored repetitions of a piece."""
    return len(_lines(file_of(folder, name)))


def complete(pieces: Sequence[Piece], folder: Path, most: int = 0, pool: Executor | None = None) -> None:
    """Run the missing repetitions of all pieces; `most` limits the repetitions of each piece (0: no limit).

    Pieces take turns, one repetition each, so that a change of the machine affects all of them. If `pool` is given,
    each piece is a job of the pool instead, and the jobs run in parallel.
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
    """Print one line about the work in progress to standard error."""
    print(" ".join(text.split())[:300], file=sys.stderr, flush=True)  # noqa: T201 - progress


def _repeat(piece: Piece, folder: Path, most: int, numbers: Sequence[int]) -> None:
    """Run and store the repetitions in `numbers` that are not stored yet; stop before number `most` (0: no limit)."""
    path, size = file_of(folder, piece.name), min(piece.size, most or piece.size)
    for number in numbers:
        lines = _lines(path)
        if len(lines) <= number < size:
            rows = list(piece.make(number))
            save(path, "".join(f"{line}\n" for line in [*lines, json.dumps(rows)]))
            progress(f"{piece.name}, {number + 1} of {size}: {rows[:1]}")


def _lines(path: Path) -> list[str]:
    """Read the lines of a file, without a last line that was cut off; return [] if there is no file."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
