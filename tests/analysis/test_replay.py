"""Reading a journal gives the verdicts that the race had when it wrote it."""

from pathlib import Path
from typing import Any

import pytest

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import Results, read
from attnbench.processes import execution
from attnbench.statistics.verdict import Judgement
from attnbench.storage.events import VisitFinished
from attnbench.storage.fold import State
from attnbench.storage.journal import JOURNAL, events
from attnbench.storage.records import Key
from attnbench.timing.schedule import Race
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient, plan
from studies.simulated.worlds import WORLDS

pytestmark = pytest.mark.usefixtures("many_visits")

RATIO = {"baseline": 1.0, "same": 1.0, "near": 1.017, "slow": 1.3}
"""One implementation is near the margin, so that the race continues for a while."""
ASKED = plan(2, tuple(RATIO), budget_s=5.0)

Said = tuple[float | None, ...]


def client_in(world: str) -> SimulatedClient:
    return SimulatedClient(WORLDS[world], lambda workload, name: 1e-4 * workload.seq_len * RATIO[name], seed=3)


def judged(found: Judgement) -> Said:
    return found.ratio, found.low, found.high


def as_read(results: Results) -> dict[Key, Said]:
    return {row.key: (row.ratio, row.low, row.high) for row in comparisons(results)}


def near(verdicts: dict[Key, Said]) -> dict[Key, Any]:
    """The same within rounding: sums over other arrays may end otherwise."""
    return {
        key: tuple(None if number is None else pytest.approx(number, rel=1e-9) for number in numbers)
        for key, numbers in verdicts.items()
    }


@pytest.fixture
def heard(monkeypatch):
    """Record all judgements of races, by number of visits and by cell."""
    found: dict[int, dict[Key, Said]] = {}

    class Listening(Race):
        def open(self, state, live, now_s=0.0):
            opened = super().open(state, live, now_s)
            if self.judged:
                found[sum(state.num_visits.values())] = {key: judged(each) for key, each in self.judged.items()}
            return opened

    monkeypatch.setattr(execution, "Race", Listening)
    return found


def cut(journal: Path, num_visits: int, folder: Path) -> Results:
    """Truncate the run after this many visits."""
    visits = [place for place, event in enumerate(events(journal)) if isinstance(event, VisitFinished)]
    lines = journal.read_bytes().splitlines(keepends=True)[: visits[num_visits - 1] + 1]
    folder.mkdir()
    (folder / JOURNAL).write_bytes(b"".join(lines))
    return read(folder)


def replayed(journal: Path) -> dict[Key, Said]:
    """Return the judgements of a race that only reads the events."""
    state = State()
    for event in events(journal):
        state.apply(event)
    race = Race(ASKED)
    race.open(state, {workload.id: list(ASKED.specs) for workload in ASKED.workloads})
    return {key: judged(found) for key, found in race.judged.items()}


@pytest.mark.parametrize(("world", "share"), [("calm", 0.0), ("busy", 0.0), ("busy", 0.5)])
def test_a_reader_finds_the_verdicts_that_the_race_had_at_every_moment(world, share, heard, tmp_path):
    """Also of a run that was cut after a `share` of its journal, and resumed."""
    client, journal = client_in(world), tmp_path / "run" / JOURNAL
    if share:
        virtual.execute(ASKED, tmp_path / "run", client)
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(lines[: int(share * len(lines))]))
        heard.clear()  # from here on the resumed race is recorded
    results = virtual.execute(ASKED, tmp_path / "run", client)
    assert bool(results.discarded) is (world == "busy")  # blocks disturbed by a neighbour are discarded for both
    moments = sorted(heard)
    assert len(moments) > 1
    for number in {moments[0], *moments[:: max(1, len(moments) // 4)], moments[-1]}:
        read_then = as_read(cut(journal, number, tmp_path / f"after {number} visits"))
        assert near(read_then) == heard[number] != {}
    assert near(as_read(results)) == replayed(journal)
