"""Salvage a damaged journal: its intact, consistent lines become a new run, which can be continued.

A line is intact if its own digest is right, regardless of the line before it. In older journals without digests, a line
is kept if it can be read.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec

from attnbench.storage.events import SCHEMA, DamagedError, LinesLost, Plan, RunStarted
from attnbench.storage.files import writing_to
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

    @property
    def is_damaged(self) -> bool:
        """Whether lines were dropped, changed or lost."""
        return bool(self.dropped or self.gaps)


def salvage(run: Path, to: Path | None = None) -> Salvaged:
    """Write the intact lines of a run, given by folder or journal, into a new folder.

    If all lines are intact, nothing is written. `to` is a folder without a run; by default it lies next to the run.

    Raises:
        ValueError: there is no such file, the folder holds a run, or cannot be written.
        DamagedError: the line with the plan is damaged, so that the rest cannot be interpreted.
    """
    journal = journal_of(run)
    found = list(lines(journal, State()))
    kept = [line.event for line in found if line.event is not None]
    dropped = {line.number: line.wrong for line in found if line.event is None}
    gaps = [line.number for line in found if line.event is not None and line.wrong]
    if not kept or not isinstance(kept[0], RunStarted):
        why = found[0].wrong if found else "it is empty"
        raise DamagedError(f"{journal}, line 1: {why}: it held the plan, without which nothing can be kept")
    source, started = journal.parent, kept[0]
    folder = to or source.with_name(f"{source.name}{SALVAGED}")
    salvaged = Salvaged(folder, started.plan, len(kept), dropped, gaps)
    if not salvaged.is_damaged:
        return salvaged
    if (folder / JOURNAL).exists():
        raise ValueError(f"{folder} holds a run: choose another folder with --to")
    kept[0] = msgspec.structs.replace(started, schema=SCHEMA, run=folder.name)
    kept.append(LinesLost(run=started.run, lines=tuple(dropped), gaps=tuple(gaps)))
    with writing_to(folder):
        write(folder / JOURNAL, kept)
    return salvaged
