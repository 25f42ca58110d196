"""A journal is folded by one function, live and on read; its samples are one array that grows."""

from pathlib import Path

from attnbench.analysis.results import read
from attnbench.storage.events import ArmSamples, VisitFinished, WorkerStarted
from attnbench.storage.fold import State
from attnbench.storage.journal import JOURNAL, events, fold
from attnbench.storage.records import PROBE, Sample, Status
from attnbench.storage.samples import CHUNK, Samples
from tests import journals


def test_reading_a_journal_gives_the_state_of_the_run_that_wrote_it(tmp_path: Path) -> None:
    journals.write(tmp_path, num_visits=2)
    live = State()
    for event in events(tmp_path / JOURNAL):
        assert live.problem(event) == ""
        live.apply(event)
    assert live == fold(tmp_path / JOURNAL)
    results = read(tmp_path)
    for record in results.records:
        arms = live.samples[record.workload.id]
        assert record.samples("latency") == (arms[record.arm] if record.status is Status.ok else ())
        assert live.status[record.key] is record.status
    assert results.num_blocks == sum(len(arms[PROBE]) for arms in live.samples.values())


def test_probes_of_other_hosts_are_of_another_kind() -> None:
    state = State()
    for number, host in enumerate(("one", "other")):
        state.apply(WorkerStarted(time="", environment=journals.ENVIRONMENT, host=host))
        taken = (ArmSamples(arm=PROBE, samples=(Sample(1e-3),)),)
        state.apply(VisitFinished(workload="w", epoch=number, visit=number, arms=taken, probe="cpu 1"))
    assert len({probe.kind for probe in state.probes}) == len(state.probes) == 2


def test_samples_are_one_array_however_they_arrive() -> None:
    samples = [Sample(1e-3 + 1e-6 * number, slot=number) for number in range(2 * CHUNK + 3)]
    grown = Samples()
    for number in range(0, len(samples), 7):
        grown.extend(samples[number : number + 7])
    assert grown == Samples.of(samples) == samples
    assert grown.slot.tolist() == list(range(len(samples)))
    assert list(grown[-2:]) == samples[-2:]
