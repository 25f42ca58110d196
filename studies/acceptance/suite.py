"""Every test: its pieces, each done by a fresh process and left in a file, and the outcome that is read from them."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from attnbench.processes.sides import current_commit
from attnbench.processes.worker_client import module_path
from attnbench.storage.events import ALLOCATORS
from studies.acceptance.outcome import LABELS, Outcome, Row, Stored, restored
from studies.acceptance.plan import ON_CUDA, WHOLE, Size, missing, sizes

ROOT = Path(__file__).parents[2]
NOT_RUN = "not run"
GATE = ["same_code", "slowdown", "same_code_apart", "slowdown_apart"]
AS_USERS_HAVE_IT = {"kills", "called_share", *GATE}
"""Whole runs, with the C library as it is. In all other pieces it is made to retain freed memory, for every tool alike:
else the ratio of two things depends on where on the heap a process happens to have them (docs/method.md)."""
Make = Callable[[int, Size], list[Row]]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one process leaves: rows, or the whole outcome of a simulated test; and what it was made with."""

    size: str = ""  # one of another size is made anew
    commit: str = ""
    made: str = ""  # when, in UTC
    rows: tuple[Stored, ...] = ()
    outcome: Outcome | None = None


@dataclass(frozen=True, kw_only=True, order=True)
class Job:
    """A piece of the work, and when in the session it is due: the pieces of each test are spread over all of it."""

    due: float
    test: str
    number: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.test}-{self.number:02d}"


MAKERS = {
    "aa_error": ("aa", "compare_all"),
    "false_alarms": ("aa", "compare_ours"),
    "power": ("power", "inject"),
    "time_to_verdict": ("power", "decide"),
    "repeatability": ("truth", "repeat"),
    "coverage": ("truth", "visit_on"),
    "busy_neighbour": ("aa", "compare_under_load"),
    "order_and_names": ("truth", "permute"),
    "kills": ("endurance", "kill"),
    "overhead": ("overhead", "interleave"),
    "called_share": ("endurance", "run_quick"),
    "small_slowdown": ("small", "sessions"),
    "same_code": ("revisions", "same_here"),
    "slowdown": ("revisions", "slower_here"),
    "same_code_apart": ("revisions", "same_apart"),
    "slowdown_apart": ("revisions", "slower_apart"),
}
"""Module and function that makes a test's pieces. The function that reads them has the test's name."""
TESTS = [name for name, label in LABELS.items() if label[0] in "TC"]


def jobs(tests: list[str], *, short: bool) -> list[Job]:
    """All pieces of these tests, and of T1 where T2 needs it, in the order in which they are to be made."""
    found = sizes(short=short)
    wanted = set(tests) | ({"aa_error"} if "false_alarms" in tests else set())
    return sorted(
        Job(due=(number + 0.5) / found[test].num_pieces, test=test, number=number)
        for test in wanted
        for number in range(found[test].num_pieces)
    )


def make(test: str, number: int, *, short: bool) -> Piece:
    """Do one piece, here."""
    if test in WHOLE:
        whole: Any = importlib.import_module(f"studies.acceptance.{WHOLE[test]}")
        return Piece(outcome=getattr(whole, test)(short=short))
    module, function = MAKERS[test]
    maker: Make = getattr(importlib.import_module(f"studies.acceptance.{module}"), function)
    return Piece(rows=tuple(dict(row) for row in maker(number, sizes(short=short)[test])))


def signed(piece: Piece, test: str, *, short: bool) -> Piece:
    """A piece that says how it was made, and when."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    return msgspec.structs.replace(piece, size=size_of(test, short=short), commit=current_commit(), made=now)


def size_of(test: str, *, short: bool) -> str:
    """What the size of a test says of one of its pieces."""
    return repr(replace(sizes(short=short)[test], num_pieces=1, num_rivals=0, piece_s=0.0))


def is_there(job: Job, folder: Path, *, short: bool) -> bool:
    """Whether a piece was made before, and of the size that is asked for now."""
    path = folder / f"{job.name}.json"
    if not path.exists():
        return False
    return msgspec.json.decode(path.read_bytes(), type=Piece).size == size_of(job.test, short=short)


def run(job: Job, folder: Path, *, short: bool) -> bool:
    """Do one piece in a fresh process, which leaves it whole or not at all; whether it did."""
    command = [sys.executable, "-P", "-m", "studies.acceptance.piece", job.test, str(job.number), str(folder)]
    settings = {} if job.test in AS_USERS_HAVE_IT else ALLOCATORS["retain"]
    environment = os.environ | settings | {"PYTHONPATH": module_path(ROOT / "harness", ROOT)}
    (folder / f"{job.name}.json").unlink(missing_ok=True)  # one of another size is none
    with (folder / f"{job.name}.log").open("wb") as log:
        done = subprocess.run(  # noqa: S603 - our own module
            [*command, *(["--short"] if short else [])], env=environment, stdout=log, stderr=log, check=False
        )
    return done.returncode == 0 and (folder / f"{job.name}.json").exists()


def read(folder: Path, every: list[Job]) -> dict[str, list[Piece]]:
    """By test, the pieces that are there."""
    found: dict[str, list[Piece]] = {}
    for job in every:
        path = folder / f"{job.name}.json"
        if path.exists():
            found.setdefault(job.test, []).append(msgspec.json.decode(path.read_bytes(), type=Piece))
    return found


def conclude(tests: list[str], made: dict[str, list[Piece]], *, short: bool) -> Iterator[Outcome]:
    """The outcome of each test; one whose pieces are not all there, or cannot be read, is a miss."""
    for test in tests:
        asked, pieces = sizes(short=short)[test].num_pieces, made.get(test, [])
        if len(pieces) < asked:
            cause = f"{asked - len(pieces)} of {asked} pieces crashed: see parts/{test}-*.log"
            yield missing(test, TITLES.get(test, test), "that it runs", cause, short=short)
            continue
        try:
            found = outcome(test, made, short=short)
            yield msgspec.structs.replace(found, made=_made(pieces or made.get("aa_error", [])))
        except Exception as error:  # noqa: BLE001 - a test that cannot be read costs its own row only
            cause = f"{type(error).__name__}: {error}"
            yield missing(test, TITLES.get(test, test), "that it can be read", cause, short=short)


def _made(pieces: list[Piece]) -> str:
    """When the last of them was made, and of which commits; a plus says that files had changed since."""
    commits = sorted({each.commit[:7] + "+" * each.commit.endswith("+") for each in pieces if each.commit})
    made = max((each.made for each in pieces), default="")
    return f"{made}, {' and '.join(commits)}" if commits else made


def outcome(test: str, made: dict[str, list[Piece]], *, short: bool) -> Outcome:
    """What a test found."""
    if test in WHOLE:
        found = made[test][0].outcome
        assert found is not None
        return found
    rows, others = rows_of(made.get(test, [])), rows_of(made.get("aa_error", []))
    if test == "false_alarms":
        return _reader("false_alarms")(others + rows, short=short)
    if test == "coverage":
        return _reader("coverage")(rows, others, sizes(short=short)["coverage"].num_repeats, short=short)
    return _reader(test)(rows, short=short)


def rows_of(pieces: list[Piece]) -> list[Row]:
    """All rows."""
    return [row for piece in pieces for row in restored(piece.rows)]


def _reader(test: str) -> Callable[..., Outcome]:
    reader: Callable[..., Outcome] = getattr(importlib.import_module(f"studies.acceptance.{MAKERS[test][0]}"), test)
    return reader


def has_cuda() -> bool:
    """Whether there is a device for the tests that need one."""
    from attnbench.devices import device

    return device("cuda").missing() is None


def left_out(*, short: bool) -> Iterator[Outcome]:
    """The tests that need a CUDA device, where there is none."""
    for test in ON_CUDA:
        title, limit = ON_CUDA_TITLES[test]
        found = f"{NOT_RUN}: no CUDA device"
        yield Outcome(id=LABELS[test], title=title, limit=limit, found=found, passes=True, is_short=short)


ON_CUDA_TITLES = {
    "kernel_sum": ("device time against the profiler's kernel sum", "within 2 % above 20 us"),
    "cold_caches": (
        "cold against hot caches",
        "they differ on an L2-sized case, cold bandwidth below the memory's peak",
    ),
    "heat_up": ("the same code through an artificial heat-up", "false alarms as without"),
    "flush": ("the flush and the timed span", "the flush is never inside"),
    "graph_mode": ("graph mode against event mode", "within 3 % above 50 us"),
}
TITLES = {
    "aa_error": "the same code against itself: RMS of the log ratio",
    "false_alarms": "the same code against itself: false alarms",
    "power": "power for injected slowdowns",
    "time_to_verdict": "time to the right verdict",
    "repeatability": "repeatability of a true ratio",
    "coverage": "coverage of the 95 % interval",
    "busy_neighbour": "false alarms next to a busy process or thread",
    "order_and_names": "order and names",
    "kills": "kills",
    "overhead": "overhead",
    "called_share": "share of time inside calls",
    "small_slowdown": "a slowdown of 1 %",
    "same_code": "two revisions with the same code",
    "slowdown": "a slowdown between two revisions",
    "same_code_apart": "two revisions with the same code, apart",
    "slowdown_apart": "a slowdown between two revisions, apart",
}
