"""Salvage a damaged journal: its intact, consistent lines become a new run, which can be continued.

A line is intact if its own digest is right, regardless of the line before it. In older journals without digests, a line
is kept if it can be read.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec

from attnbench.storage.events import SCHEMA, DamagedError, Event, LinesLost, Plan, RunStarted
from attnbench.storage.fold import State
from attnbench.storage.journal import JOURNAL, journal_of, lines, write

SALVAGED = "-salvaged"


class Salvaged(NamedTuple):
    """A run that was rewritten."""

    folder: Path
    plan: Plan
    num_kept: int
    dropped: dict[int, str]  # reason by line number
    gaps: list[int]  # intact lines after a change or a loss
    is_damaged: bool


def salvage(run: Path, to: Path | None = None) -> Salvaged:
    """Write the intact lines of a run, given by folder or journal, into a new folder.

    If all lines are intact, nothing is written. `to` is a folder without a run; by default it lies next to the run.

    Raises:
        ValueError: there is no such file, the folder holds a run, or cannot be written.
        DamagedError: the line with the plan is damaged, so that the rest cannot be interpreted.
    """
    journal = journal_of(run)
    kept, dropped, gaps = list[Event](), dict[int, str](), list[int]()
    for line in lines(journal, State()):
        if line.event is not None:
            gaps += [line.number] * bool(line.wrong)
            kept.append(line.event)
        elif kept:
            dropped[line.number] = line.wrong
        else:
            raise DamagedError(f"{journal}, line 1: {line.wrong}: it held the plan, without which nothing can be kept")
    if not kept:
        raise DamagedError(f"{journal} is empty: there is nothing to keep")
    started = kept[0]
    assert isinstance(started, RunStarted)
    source = journal.parent
    folder = to or source.with_name(f"{source.name}{SALVAGED}")
    salvaged = Salvaged(folder, started.plan, len(kept), dropped, gaps, is_damaged=bool(dropped or gaps))
    if not salvaged.is_damaged:
        return salvaged
    if (folder / JOURNAL).exists():
        raise ValueError(f"{folder} holds a run: choose another folder with --to")
    kept[0] = msgspec.structs.replace(started, schema=SCHEMA, run=folder.name)
    kept.append(LinesLost(run=started.run, lines=tuple(sorted(dropped)), gaps=tuple(gaps)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / JOURNAL, kept)
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another folder with --to") from None
    return salvaged
