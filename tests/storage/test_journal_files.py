"""A journal is folded by one function, live and on read; a damaged one is reported with the place of the damage."""

import gzip
import hashlib
import random
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnbench.analysis.results import read
from attnbench.storage.events import (
    ArmSamples,
    DamagedError,
    JournalRestored,
    LinesLost,
    RunFinished,
    VisitFinished,
    WorkerStarted,
)
from attnbench.storage.fold import State
from attnbench.storage.journal import JOURNAL, Journal, events, fold, salvage
from attnbench.storage.records import PROBE, Sample, Status
from attnbench.storage.samples import CHUNK, Samples
from studies.torture.damages import DAMAGES
from tests import journals

END = RunFinished(time="2026-01-01T00:00:00+00:00", elapsed_s=1.0)
WHOLE = gzip.compress((Path(__file__).parents[1] / "conftest.py").read_bytes())


@pytest.mark.parametrize(
    "content",
    [WHOLE[:-20], WHOLE[:20] + bytes(40) + WHOLE[60:], WHOLE[:-8] + bytes(8), b"no gzip at all"],
    ids=["cut short", "damaged stream", "wrong checksum", "not compressed"],
)
def test_a_damaged_compressed_journal_is_named(tmp_path, content):
    path = tmp_path / f"{JOURNAL}.gz"
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"journal\.jsonl\.gz is cut short or damaged"):
        list(events(path))


def whole(folder: Path) -> list[bytes]:
    """Return the lines of a lifelike journal with cells of all kinds, small, since it is read a hundred times."""
    points = journals.workloads(scope=("attention", "module"), mask=("none", "causal"), seq_len=(128, 2048))
    journals.write(folder, points, ("sdpa", "naive_loop", "torch_mha", "module_list", "sdpa_math"), num_epochs=2)
    return (folder / JOURNAL).read_bytes().splitlines(keepends=True)


def resigned(lines: list[bytes]) -> list[bytes]:
    """Return the lines as a version with a bug might have written them: with the right number and digest."""
    made = []
    for number, line in enumerate(lines, start=1):
        numbered = re.sub(rb',"seq":\d+,"digest":"\w+"', b"", line).rstrip(b"\n")[:-1] + b',"seq":%d' % number
        digest = hashlib.blake2b(numbered, digest_size=8).hexdigest().encode()
        made.append(numbered + b',"digest":"%b"}\n' % digest)
    return made


def damages(lines: list[bytes], number: int) -> Iterator[tuple[str, int, bytes]]:
    """Damage a journal in ways that show; yield a description, the first damaged line, and the file's content."""
    draws = random.Random(0)
    for turn in range(number):
        name = list(DAMAGES)[turn % len(DAMAGES)]
        text = b"".join(DAMAGES[name](lines, draws))
        there = text.splitlines(keepends=True) if name != "bytes that are no text" else text.split(b"\n")
        pairs = enumerate(zip(lines, there, strict=False))
        differing = (place for place, (one, other) in pairs if one.rstrip() != other.rstrip())
        if text != b"".join(lines) and text.endswith(b"\n"):
            yield name, next(differing, len(lines)), text


def damaged(folder: Path, content: bytes) -> Path:
    """Write the content of a journal into a folder; return its path."""
    folder.mkdir(exist_ok=True)
    (folder / JOURNAL).write_bytes(content)
    return folder / JOURNAL


def changed(lines: list[bytes], what: bytes, into: bytes) -> list[bytes]:
    assert any(what in line for line in lines)
    return [line.replace(what, into, 1) for line in lines]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: [*lines, *lines], "a second run, "),
        (lambda lines: lines[1:], "does not begin with run_started"),
        (lambda lines: twice(lines, b"visit_finished"), "comes after visit"),
        (lambda lines: twice(lines, b"cell_checked"), "a second check of"),
        (lambda lines: twice(lines, b"cell_measured"), "a second measurement of"),
        (lambda lines: changed(lines, b'"samples":[[0.', b'"samples":[[-0.'), "a sample has"),
        (
            lambda lines: changed(lines, b'"implementation":"sdpa"', b'"implementation":"sdqa"'),
            "no implementation sdqa",
        ),
        (lambda lines: changed(lines, b'"workload":"', b'"workload":"x'), "the plan has no workload x"),
        (lambda lines: [*lines[:3], b"[" * 3000 + b"]" * 3000 + b"\n", *lines[3:]], "not an event of a journal"),
        (lambda lines: [*lines[:3], b"\xff\xfe{}\n", *lines[3:]], "not an event of a journal"),
        (lambda lines: [*lines[:3], b"\n", *lines[3:]], "not an event of a journal"),
    ],
    ids=[
        *("twice", "no beginning", "visit twice", "check twice", "metric twice"),
        *("below zero", "no such implementation", "no such workload", "brackets", "no text", "empty line"),
    ],
)
def test_with_right_digests_what_makes_no_sense_is_noticed(tmp_path, damage, said):
    path = damaged(tmp_path / "old", b"".join(resigned(damage(whole(tmp_path)))))
    with pytest.raises(DamagedError, match=r"line \d+: ") as raised:
        list(events(path))
    assert said in str(raised.value)


def twice(lines: list[bytes], what: bytes) -> list[bytes]:
    place = next(number for number, line in enumerate(lines) if what in line)
    return [*lines[: place + 1], *lines[place:]]


def test_a_newer_schema_and_a_digest_that_is_gone_are_damage(tmp_path):
    lines = whole(tmp_path)
    path = damaged(tmp_path / "other", b"".join([lines[0].replace(b'"schema":6', b'"schema":7'), *lines[1:]]))
    with pytest.raises(DamagedError, match="has schema 7, newer than 6: update attnbench"):
        list(events(path))
    path.write_bytes(b"".join([lines[0], *(re.sub(rb',"digest":"\w+"', b"", line) for line in lines[1:])]))
    with pytest.raises(DamagedError, match="line 2: it was changed: it has lost its digest"):
        list(events(path))


def test_whatever_is_changed_is_noticed_at_its_line_and_salvage_keeps_the_rest(tmp_path):
    lines = whole(tmp_path)
    intact = list(events(tmp_path / JOURNAL))
    assert len(intact) == len(lines)
    for number, (what, place, text) in enumerate(damages(lines, 120)):
        path, to = damaged(tmp_path / "damaged", text), tmp_path / f"{number}"
        with pytest.raises(DamagedError) as raised:
            list(events(path))
        is_named = f"line {place + 1}:" in str(raised.value) and "--salvage" in str(raised.value)
        assert is_named or "has schema" in str(raised.value), what
        if place == 0:
            with pytest.raises(DamagedError):
                salvage(path, to)
            assert not to.exists()
        elif number < 2 * len(DAMAGES):
            saved, kept = salvage(path, to), list(events(to / JOURNAL))
            assert isinstance(kept[-1], LinesLost)
            assert all(each in intact for each in kept[1:-1]), what
            assert len(kept) - 1 == saved.num_kept >= len(intact) - 2, what
            assert saved.dropped or saved.gaps, what
            assert read(to).num_lost > 0


def test_salvage_writes_nothing_without_need_and_over_no_run(tmp_path):
    lines = whole(tmp_path / "run")
    saved = salvage(tmp_path / "run")
    assert not saved.is_damaged
    assert not saved.folder.exists()
    damaged(tmp_path / "run", b"".join(lines[:4] + lines[5:]))
    with pytest.raises(ValueError, match="holds a run: choose another folder with --to"):
        salvage(tmp_path / "run", damaged(tmp_path / "other", b"").parent)


def test_a_journal_that_ends_early_is_read_and_gone_on_with(tmp_path):
    lines = whole(tmp_path)
    path = damaged(tmp_path / "short", b"".join(lines[:5]) + lines[5][:20])
    with Journal(path.parent) as journal:
        journal.append(END)
    assert len(list(events(path))) == 6
    path.write_bytes(path.read_bytes().replace(b'"elapsed_s":1.0', b'"elapsed_s":2.0'))
    with pytest.raises(DamagedError, match="line 6"):
        list(events(path))


@pytest.mark.usefixtures("interruptible")
def test_a_line_that_ctrl_c_interrupts_is_written_once_and_whole(tmp_path, monkeypatch):
    """The interruption came between the write and the count of lines: the next line had the number of this one."""
    path = damaged(tmp_path / "run", b"".join(whole(tmp_path)[:5]))
    with Journal(path.parent) as journal, monkeypatch.context() as patch:
        flush = journal._file.flush

        def interrupted():
            flush()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        patch.setattr(journal._file, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.append(END)
        patch.undo()
        journal.append(END)
    assert len(list(events(path))) == 7


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b"nothing"),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"elapsed_s":1.0', b'"elapsed_s":9.0')),
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_name("elsewhere")),
        lambda path: path.write_bytes(path.read_bytes() + b"{}\n"),
    ],
    ids=["overwritten", "one digit", "removed", "moved", "appended to"],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_what_another_process_does_to_a_journal_is_undone_and_noted(tmp_path, harm, is_last):
    first, second = (RunFinished(time="", elapsed_s=each) for each in (1.0, 2.0))
    begin(tmp_path)
    with Journal(tmp_path, keeps_copy=True) as journal:
        journal.append(first)
        harm(tmp_path / JOURNAL)
        if not is_last:
            journal.append(second)
    found = list(events(tmp_path / JOURNAL))
    assert [each for each in found[1:] if not isinstance(each, JournalRestored)] == [first, second][: 2 - is_last]
    assert sum(isinstance(each, JournalRestored) for each in found) == 1
    assert read(tmp_path).num_restored == 1


def begin(folder: Path) -> None:
    journals.write(folder)
    damaged(folder, (folder / JOURNAL).read_bytes().splitlines(keepends=True)[0])


def test_a_folder_that_is_gone_is_said_to_be(tmp_path):
    for keeps_copy in (True, False):
        folder = tmp_path / f"{keeps_copy}"
        begin(folder)
        with Journal(folder, keeps_copy=keeps_copy) as journal:
            journal.append(END)
            shutil.rmtree(folder)
            with pytest.raises(DamagedError, match="was removed during the run, and its results are lost"):
                journal.append(END)
            folder.mkdir()
            (folder / JOURNAL).touch()


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
