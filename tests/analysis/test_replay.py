"""Reading a journal gives exactly the verdicts that the race had when it wrote it."""

from pathlib import Path

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


def assert_read_as_heard(heard: dict[int, dict[Key, Said]], journal: Path, folder: Path) -> None:
    """Compare the numbers after the first and last visit, and at a few points between."""
    moments = sorted(heard)
    assert len(moments) > 1
    for number in {moments[0], *moments[:: max(1, len(moments) // 4)], moments[-1]}:
        then = as_read(cut(journal, number, folder / f"after {number} visits"))
        assert heard[number]
        assert then == heard[number]


@pytest.mark.parametrize("world", ["calm", "busy"])
def test_a_reader_finds_the_verdicts_that_the_race_had_at_every_moment(world, heard, tmp_path):
    results = virtual.execute(ASKED, tmp_path / "run", client_in(world))
    journal = tmp_path / "run" / JOURNAL
    assert bool(results.discarded) is (world == "busy")  # blocks disturbed by a neighbour are discarded for both
    assert_read_as_heard(heard, journal, tmp_path)
    assert as_read(results) == replayed(journal)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_a_run_that_was_cut_and_resumed_leaves_a_journal_that_says_what_its_race_saw(share, heard, tmp_path):
    client, folder = client_in("busy"), tmp_path / "run"
    virtual.execute(ASKED, folder, client)
    journal = folder / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: int(share * len(lines))]))
    heard.clear()  # from here on the resumed race is recorded
    results = virtual.execute(ASKED, folder, client)
    assert_read_as_heard(heard, journal, tmp_path)
    assert as_read(results) == replayed(journal)
