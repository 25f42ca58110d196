"""What a history needs of each run: its cells with their values, kept in SQLite so that nothing is read twice.

The index is made from journals, can be deleted at any time and is never the truth: a file that is no longer the same
to the file system, or another version of attnbench, is read again. It lies in the user's cache folder
(https://specifications.freedesktop.org/basedir-spec); where that cannot be written, all is read each time.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import Results, read
from attnbench.analysis.table import Row, metric_columns, values_of
from attnbench.storage.records import Status

FILE = "history.sqlite"
WAIT_S = 5.0
"""For another process that writes to the index."""
_MAKE = "CREATE TABLE IF NOT EXISTS runs (journal TEXT PRIMARY KEY, stamp TEXT NOT NULL, content BLOB NOT NULL)"


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A run as histories need it."""

    folder: str
    run: str
    time: str
    baseline: str
    conditions: str
    has_sides: bool
    machines: dict[str, str]  # the processor, by fingerprint
    columns: dict[str, str]  # that of each metric, times apart
    units: dict[str, str]  # of the same
    cells: tuple[dict[str, Any], ...]  # those that are ok: a part of their rows in the table of cells


def stored(results: Results) -> Stored:
    """What a history needs of a run."""
    metrics = metric_columns(results)
    ratios = {each.key: (each.ratio, each.low, each.high) for each in comparisons(results)}
    cells: list[Row] = []
    for record in results.records:
        if record.status is Status.ok:
            found = ratios.get(record.key, (None, None, None))
            cells.append(values_of(record) | dict(zip(("ratio", "ratio_low", "ratio_high"), found, strict=True)))
    return Stored(
        folder=str(results.folder),
        run=results.run,
        time=results.started.time,
        baseline=results.plan.baseline,
        conditions=results.plan.conditions,
        has_sides=results.plan.sides is not None,
        machines={name: found.cpu for name, found in results.environments.items()},
        columns={each.metric: each.name for each in metrics},
        units={each.metric: each.unit for each in metrics},
        cells=tuple(cells),
    )


def look_up(journals: Sequence[Path], place: Path | None) -> list[Stored]:
    """Each of the journals as histories need it: from the index at `place`, or read, and put there.

    Raises:
        ValueError: a journal cannot be read, see `analysis.results.read`.
    """
    stamps = {journal: _stamp(journal) for journal in journals}
    known = _known(stamps, place)
    made = {journal: stored(read(journal)) for journal in journals if journal not in known}
    if made and place is not None:
        _keep({journal: (stamps[journal], each) for journal, each in made.items()}, place)
    return [known.get(journal) or made[journal] for journal in journals]


def _stamp(journal: Path) -> str:
    """What changes whenever the file does, and whenever attnbench does."""
    with suppress(OSError):
        found = journal.stat()
        return f"{_version()}/{found.st_ino}/{found.st_size}/{found.st_mtime_ns}/{found.st_ctime_ns}"
    return ""


def _version() -> str:
    """Changes with the code that makes what is kept."""
    package = Path(__file__).parents[1]
    files = [
        file for part in ("analysis", "statistics", "storage", "workloads") for file in (package / part).glob("*.py")
    ]
    return f"{len(files)}/{max(file.stat().st_mtime_ns for file in files)}"


def _known(stamps: dict[Path, str], place: Path | None) -> dict[Path, Stored]:
    if place is None or not place.exists():
        return {}
    decoder, found = msgspec.json.Decoder(Stored), {}
    with suppress(sqlite3.Error, msgspec.DecodeError), closing(sqlite3.connect(place, timeout=WAIT_S)) as index:
        for journal, stamp in stamps.items():
            row = index.execute("SELECT stamp, content FROM runs WHERE journal = ?", (str(journal),)).fetchone()
            if stamp and row is not None and row[0] == stamp:
                found[journal] = decoder.decode(row[1])
    return found


def _keep(made: dict[Path, tuple[str, Stored]], place: Path) -> None:
    """Write to the index; where that fails, what was read is read again next time."""
    rows = [(str(journal), stamp, msgspec.json.encode(each)) for journal, (stamp, each) in made.items()]
    with suppress(OSError, sqlite3.Error):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(rows, place)
        except sqlite3.DatabaseError:
            place.unlink(missing_ok=True)  # damaged
            _write(rows, place)


def _write(rows: Sequence[tuple[str, str, bytes]], place: Path) -> None:
    with closing(sqlite3.connect(place, timeout=WAIT_S)) as index, index:
        index.execute(_MAKE)
        index.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", rows)
