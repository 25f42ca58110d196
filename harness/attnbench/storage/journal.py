"""The journal of a run: one JSON line for each event. Lines are appended and synced as work finishes, and read back.

A journal is data, and is never executed. Each line ends with its number and a digest, which reveal every changed digit
and every removed, added or moved line. Only lines missing at the end, as after a kill, go unnoticed. Each event must
also be possible after the earlier ones (storage/fold.py). A last line that a kill cut short is dropped. Any other
damage is an error that names the line, and `salvage` keeps the intact lines. storage/older.py converts journals of
earlier schemas (docs/adr/0003-journal.md has the history).

This module does not judge measurements (analysis/results.py does). It also finds runs by name, folder or age below the
folder of results. Source of the idea that run and report share only files: https://asv.readthedocs.io.
"""

import fcntl
import gzip
import hashlib
import math
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from attnbench.storage.events import SCHEMA, DamagedError, Event, JournalRestored, LinesLost, Plan, RunStarted, now
from attnbench.storage.files import write_atomically, writing_to
from attnbench.storage.fold import State

JOURNAL = "journal.jsonl"
PACKED = f"{JOURNAL}.gz"  # a compressed journal, which can be read but not continued
HOSTS = "hosts"  # subfolder of a run on several hosts: HOST/SHARE/journal.jsonl
SALVAGED = "-salvaged"  # end of the name of a salvaged run
SYNC_EVERY_S = 0.1  # least seconds between two syncs to the disk; a kill of the process loses nothing without a sync
SIGNATURE = re.compile(rb',"seq":(\d+),"digest":"(\w+)"\}$')  # the end of a line: its number and its digest
NO_EVENT = (msgspec.DecodeError, RecursionError, ValueError, KeyError, TypeError, AttributeError)
"""Exceptions that decoding raises if a line is not an event."""
_SCHEMA = re.compile(rb'^\{"type":"run_started","schema":(\d+),')
_DECODER = msgspec.json.Decoder(Event)
_ENCODER = msgspec.json.Encoder()


class Unstored:
    """A substitute for a `Journal` in a check, which is never resumed: the state is in memory, and there is no file."""

    def __init__(self) -> None:
        self.state = State()

    def append(self, event: Event) -> None:
        """Apply an event to the state."""
        self.state.apply(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no file to close."""


class Journal:
    """An open journal to append to. Use it as a context manager."""

    def __init__(self, folder: Path, *, keeps_copy: bool = False) -> None:
        """Open `folder`/journal.jsonl for appending, dropping a last line that a kill cut short.

        `state` is the state of the run after all events in the file. With `keeps_copy`, for runs of untrusted code, all
        lines also stay in memory: if another process has changed the file by the end of the context, the file is
        restored from memory, and a `JournalRestored` is appended.

        Raises:
            ValueError: the folder cannot be created or written, or another process is writing there.
            DamagedError: the journal there is damaged.
        """
        self.path, self._synced_s = folder / JOURNAL, -math.inf
        with writing_to(folder, "--results"):
            self._file = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"{folder} is being written by another process: wait for its end, or stop it") from None
        except OSError:
            pass  # the file system has no locks
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        self._file.truncate(whole)
        self._num_lines = text.count(b"\n")
        self._copy = bytearray(text[:whole]) if keeps_copy else None
        self.state = fold(self.path)
        self._writer = ThreadPoolExecutor(1)  # a signal interrupts only the main thread, so every line stays whole

    def append(self, event: Event) -> None:
        """Append one event, so that a kill cannot lose it; sync the file to the disk at most ten times a second.

        Appending the events of 100,000 predicted cells takes seconds; with a sync for each event it would take minutes.
        If Ctrl-C interrupts the caller, the line is written nevertheless.

        Raises:
            OSError: the disk is full, or fails.
            DamagedError: another process has removed the file or, if a copy is kept, the folder.
        """
        self._writer.submit(self._append, event).result()

    def _append(self, event: Event) -> None:
        is_there = os.fstat(self._file.fileno()).st_nlink if self._copy is None else self.path.parent.is_dir()
        if not is_there:
            raise DamagedError(f"{self.path} was removed during the run, and its results are lost: start a new run")
        line = signed(event, self._num_lines + 1)
        if self._copy is not None:
            self._copy += line
        self._file.write(line)
        self._file.flush()
        self._num_lines += 1
        if time.monotonic() - self._synced_s >= SYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced_s = time.monotonic()
        self.state.apply(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._writer.shutdown()
        with self._file, suppress(OSError) if kind is not None else nullcontext():  # an earlier exception has priority
            os.fsync(self._file.fileno())
            if self._copy is not None and not (self.path.exists() and self.path.read_bytes() == self._copy):
                write_atomically(
                    self.path, bytes(self._copy) + signed(JournalRestored(time=now()), self._num_lines + 1)
                )


def signed(event: Event, number: int) -> bytes:
    """Encode an event as a line with its number and its digest."""
    numbered = _ENCODER.encode(event)[:-1] + b',"seq":%d' % number
    return numbered + b',"digest":"%b"}\n' % _digest(numbered)


def _digest(text: bytes, num_bytes: int = 8) -> bytes:
    return hashlib.blake2b(text, digest_size=num_bytes).hexdigest().encode()


Line = tuple[int, Event | None, str]
"""Number, event and fault of a line; the fault of an intact line is "". A line with a fault and no event was changed,
or cannot come next. If a line has a fault and an event, other lines were removed, added or moved before it."""


def read_lines(path: Path, state: State) -> Iterator[Line]:
    """Yield each complete line of a journal file with its fault, and apply its event to `state`.

    Raises:
        ValueError: the file cannot be read.
        DamagedError: a compressed file is incomplete, or the schema is not this version's.
    """
    due = 1
    for number, line in enumerate(lines_of(path), start=1):
        if number == 1 and (schema := schema_of(line)) != SCHEMA:
            older = "older than {}: attnbench report converts a run, attnbench gate --accept stores a new baseline"
            relation = "newer than {}: update attnbench to read it" if schema > SCHEMA else older
            raise DamagedError(f"{path} has schema {schema}, {relation.format(SCHEMA)}")
        event, place = None, due
        signature = SIGNATURE.search(line, max(0, len(line) - 80))  # a signature is shorter
        try:
            event = _DECODER.decode(line)
            if signature is None:
                wrong = "it was changed: it has lost its digest"
            elif signature[2] != _digest(line[: signature.end(1)]):
                wrong = "it was changed"
            else:
                place, wrong = int(signature[1]), state.problem(event)
        except NO_EVENT as error:
            wrong = f"not an event of a journal ({error})"
        if wrong or event is None:
            yield number, None, wrong
        else:
            state.apply(event)
            yield number, event, "" if place == due else f"it is line {place} of the run, and line {due} was due"
        due = 1 + place


def schema_of(first_line: bytes) -> int:
    """Return the schema in the first line of a journal; the present one if damage hides it."""
    found = _SCHEMA.match(first_line)
    return int(found[1]) if found else SCHEMA


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a journal file without line ends; an incomplete last line is dropped.

    Raises:
        ValueError: the file cannot be read.
        DamagedError: a compressed file is incomplete.
    """
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).split(b"\n")[:-1]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DamagedError(f"{path} is cut short or damaged: {error}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot read {path}: {reason}; give a run's folder or its {JOURNAL}") from None


def events(path: Path, state: State | None = None) -> Iterator[Event]:
    """Yield the events of a journal file in order, and apply them to `state`.

    Raises:
        ValueError: the file cannot be read.
        DamagedError: a line is damaged or contradicts earlier ones, the file is not a journal, or the schema is not
            this version's.
    """
    for number, event, wrong in read_lines(path, State() if state is None else state):
        if event is None or wrong:
            keep = f"attnbench report {path.parent} --salvage keeps what is intact"
            raise DamagedError(f"{path}, line {number}: {wrong}; {keep}")
        yield event


def fold(path: Path) -> State:
    """Return the state of a run after all events of its journal file; raise the errors of `events`."""
    state = State()
    deque(events(path, state), maxlen=0)
    return state


def write(path: Path, history: Iterable[Event]) -> None:
    """Rewrite a journal file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, b"".join(signed(event, number) for number, event in enumerate(history, start=1)))


class Salvaged(NamedTuple):
    """The result of `salvage`: a run rewritten from its intact lines. If it was not damaged, nothing was written."""

    folder: Path  # of the rewritten run
    plan: Plan
    num_kept: int  # intact lines
    dropped: dict[int, str]  # reason by line number
    gaps: list[int]  # numbers of intact lines before which lines were removed, added or moved

    @property
    def is_damaged(self) -> bool:
        """Whether a line was dropped or there is a gap."""
        return bool(self.dropped or self.gaps)


def salvage(run: Path, to: Path | None = None) -> Salvaged:
    """Write the intact lines of a damaged run, given by folder or journal, as a new run that can be continued.

    A line is intact if its own digest is right and its event can follow the earlier ones. `to` is the new folder; by
    default it is NAME-salvaged, next to the folder NAME of the run.

    Raises:
        ValueError: the journal cannot be read, `to` already has a run, or `to` cannot be written.
        DamagedError: the line with the plan is damaged, so that the rest cannot be interpreted.
    """
    journal = journal_of(run)
    every = list(read_lines(journal, State()))
    kept = [event for _, event, _ in every if event is not None]
    if not kept or not isinstance(started := kept[0], RunStarted):
        why = every[0][2] if every else "it is empty"
        raise DamagedError(f"{journal}, line 1: {why}: it held the plan, without which nothing can be kept")
    salvaged = Salvaged(
        folder=to or journal.parent.with_name(f"{journal.parent.name}{SALVAGED}"),
        plan=started.plan,
        num_kept=len(kept),
        dropped={number: wrong for number, event, wrong in every if event is None},
        gaps=[number for number, event, wrong in every if event is not None and wrong],
    )
    if salvaged.is_damaged:
        folder = salvaged.folder
        if (folder / JOURNAL).exists():
            raise ValueError(f"{folder} holds a run: choose another folder with --to")
        start = msgspec.structs.replace(started, schema=SCHEMA, run=folder.name)
        lost = LinesLost(run=started.run, lines=tuple(salvaged.dropped), gaps=tuple(salvaged.gaps))
        with writing_to(folder):
            write(folder / JOURNAL, [start, *kept[1:], lost])
    return salvaged


def journal_of(path: Path) -> Path:
    """Return the journal in a run's folder, the compressed one only if there is no other; return a file unchanged."""
    if not path.is_dir() and path.suffix:
        return path
    packed = path / PACKED
    return packed if packed.exists() and not (path / JOURNAL).exists() else path / JOURNAL


def has_journal(folder: Path) -> bool:
    """Return whether the folder has a run."""
    return journal_of(folder).is_file()


def find_runs(results: Path) -> list[Path]:
    """Return the run folders below `results`, oldest first: their names begin with the time of the start."""
    return sorted(folder for folder in (results / "runs").glob("*") if has_journal(folder))


def find_run(name: str | None, results: Path) -> Path:
    """Find a run's folder; `name` is a name below `results`, a folder, a journal, or None for the newest run.

    Raises:
        ValueError: there is no such run; the message names the newest runs.
    """
    for candidate in () if name is None else (results / "runs" / name, Path(name)):
        if (journal := journal_of(candidate)).name in {JOURNAL, PACKED} and journal.is_file():
            return journal.parent
    runs = find_runs(results)
    if runs and name is None:
        return runs[-1]
    missing = "" if name is None else f"there is no run {name}; "
    if runs:
        raise ValueError(f"{missing}the newest are {', '.join(folder.name for folder in runs[-5:])}")
    raise ValueError(f"{missing}{results / 'runs'} holds no runs: begin with attnbench run, or name another --results")
