"""Older journals are converted once: arms that were names until schema 3, and lines without numbers until 5.

tests/analysis/test_golden.py has the verdicts of such journals.
"""

import json
import re
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.reports import titles
from attnbench.storage import older
from attnbench.storage.events import (
    SCHEMA,
    ArmSamples,
    CellChecked,
    DamagedError,
    Event,
    RunStarted,
    VisitFinished,
)
from attnbench.storage.journal import JOURNAL, Journal, events
from attnbench.storage.records import BASE, CANDIDATE, LATENCY, PROBE, Arm, Sample, Status
from attnbench.workloads.workload import Workload
from tests import journals

WORKLOAD = Workload(seq_len=8)
Line = dict[str, object]
CONTROL = {"role": "control"}
SDPA, ODD, FUSED = (Arm(implementation=name) for name in ("sdpa", "odd (twin)", "fused"))
PLAN = {"sweep": "quick", "workloads": [msgspec.to_builtins(WORKLOAD)], "baseline": "sdpa", "metrics": ["latency"]}
PLAN |= {"budget_s": 60.0, "call_limit_s": 5.0, "timeout_s": 30.0, "memory_limit_bytes": 0}


def started(*specs: str, schema: int = 3, **changes) -> Line:
    """Build the first line of a run of these implementations."""
    plan = {**PLAN, "implementations": specs, **changes}
    return {"type": "run_started", "schema": schema, "run": "old", "time": "", "commit": "abc", "plan": plan}


def checked(name: str) -> Line:
    return {"type": "cell_checked", "workload": WORKLOAD.id, "implementation": name, "status": "ok"}


def visit(*names: str) -> Line:
    """Build a visit of one block; the value of a sample identifies its arm."""
    arms = {name: [[1e-3 * (1 + slot), 4, 0, 0, 0, slot]] for slot, name in enumerate(names)}
    return {"type": "visit_finished", "workload": WORKLOAD.id, "epoch": 0, "visit": 0, "arms": arms}


def write(folder: Path, *lines: Line) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (folder / JOURNAL).write_text(text, encoding="utf-8")
    return folder / JOURNAL


def converted(journal: Path) -> list[Event]:
    with pytest.raises(DamagedError, match="older than 6: attnbench report converts a run"):
        list(events(journal))
    before = journal.read_bytes()
    assert older.convert(journal)
    assert not older.convert(journal)
    assert journal.with_name(f"{journal.name}.old").read_bytes() == before
    return list(events(journal))


def expected(*arms: Arm | None, number: int = 0) -> VisitFinished:
    """Return the event that `visit` should become; None stands for second samples of a baseline, which are left out."""
    samples = [Sample(1e-3 * (1 + slot), 4, visit=number, slot=slot) for slot in range(len(arms))]
    taken = (ArmSamples(arm=arm, samples=(sample,)) for arm, sample in zip(arms, samples, strict=True) if arm)
    return VisitFinished(workload=WORKLOAD.id, epoch=0, visit=number, arms=tuple(taken))


@pytest.mark.parametrize("baseline", [SDPA, ODD])
def test_the_baseline_has_a_control_and_a_name_that_ends_alike_is_a_name(tmp_path: Path, baseline: Arm) -> None:
    lines = (
        started("sdpa", "odd (twin)=odd.py:f", baseline=baseline.implementation),
        *map(checked, ("sdpa", "odd (twin)")),
        visit("odd (twin)", "(canary)", f"{baseline.implementation} (twin)", "sdpa"),
    )
    first, *cells, taken = converted(write(tmp_path, *lines))
    assert isinstance(first, RunStarted)
    assert first.schema == SCHEMA
    assert first.plan.specs == {SDPA: "sdpa", ODD: "odd (twin)=odd.py:f"}
    assert [cell.key for cell in cells if isinstance(cell, CellChecked)] == [(WORKLOAD.id, SDPA), (WORKLOAD.id, ODD)]
    assert taken == expected(ODD, PROBE, None, SDPA)


@pytest.mark.parametrize("is_apart", [True, False])
def test_of_two_sides_each_name_becomes_an_implementation_and_its_side(tmp_path: Path, *, is_apart: bool) -> None:
    sides = {"base": {"given": "rev:old"}, "candidate": {"given": "rev:new"}, "is_apart": is_apart}
    named = [] if is_apart else ["x (twin)=new/x.py:g"]  # a candidate has a control only in processes of its own
    lines = (
        started("x (base)=old/x.py:f", "x=new/x.py:f", "y=sdpa", *named, baseline="x (base)", sides=sides),
        checked("x (base)"),
        visit("x (twin)", "x (base) (twin)", "(canary)", "x (base)"),
    )
    first, cell, taken = converted(write(tmp_path, *lines))
    assert isinstance(first, RunStarted)
    assert isinstance(cell, CellChecked)
    base, new = Arm(implementation="x", side=BASE), Arm(implementation="x", side=CANDIDATE)
    odd = Arm(implementation="x (twin)", side=CANDIDATE)
    specs = {base: "old/x.py:f", new: "new/x.py:f", Arm(implementation="y", side=CANDIDATE): "sdpa"}
    assert first.plan.specs == (specs if is_apart else specs | {odd: "new/x.py:g"})
    assert (first.plan.implementations, first.plan.baseline, cell.key) == ((), "", (WORKLOAD.id, base))
    assert taken == expected(None if is_apart else odd, None, PROBE, base)


def test_a_converted_run_is_gone_on_with(tmp_path: Path) -> None:
    journal = write(tmp_path, started("sdpa", "fused"), checked("sdpa"), visit("sdpa", "sdpa (twin)", "(canary)"))
    before = converted(journal)
    later = [
        CellChecked(workload=WORKLOAD.id, implementation="fused", status=Status.ok),
        expected(FUSED, PROBE, SDPA, number=1),
    ]
    with Journal(tmp_path) as opened:
        for event in later:
            opened.append(event)
    assert list(events(journal)) == before + later
    assert before[2] == expected(SDPA, None, PROBE)
    sdpa, fused = read(tmp_path).records
    assert [len(sdpa.samples(LATENCY)), len(fused.samples(LATENCY))] == [2, 1]


def test_lines_of_schema_5_lose_their_digests_and_second_samples(tmp_path: Path) -> None:
    arms = [{"arm": {"implementation": "sdpa", **role}, "samples": [[1e-3, 4, 0, 0, 0, 0]]} for role in ({}, CONTROL)]
    line = {"type": "visit_finished", "workload": WORKLOAD.id, "epoch": 0, "visit": 0, "arms": arms}
    lines = [
        each | {"digest": "0123456789ab0123456789ab"} for each in (started("sdpa", schema=5), checked("sdpa"), line)
    ]
    assert converted(write(tmp_path, *lines))[2] == expected(SDPA)


@pytest.mark.parametrize(
    ("number", "damaged"),
    [
        (3, '{"type":"visit_finished","workload":"w","epoch":0,"visit":0,"arms":{"sdpa":[["slow"]]}}'),
        (3, '{"type":"visit_finished","workload":"w","epoch":0,"visit":0}'),
        (3, '["visit_finished"]'),
        (3, ""),
        (1, '{"type":"run_started","schema":3,"run":"old"'),
        (1, '{"type":"run_started","schema":3,"run":"old","plan":7}'),
        (1, '{"type":"run_started","schema":3,"run":"old","plan":{}}'),
    ],
)
def test_a_damaged_line_is_named_with_its_file(tmp_path: Path, number: int, damaged: str) -> None:
    journal = write(tmp_path, *[started("sdpa"), checked("sdpa")][: number - 1])
    with journal.open("a", encoding="utf-8") as file:
        file.write(damaged + "\n")
    with pytest.raises(DamagedError, match=rf"^{re.escape(str(journal))}, line {number}: not an event of a journal \("):
        older.convert(journal)
    assert not journal.with_name(f"{journal.name}.old").exists()


def test_todays_names_are_not_taken_for_old_ones(tmp_path: Path) -> None:
    twin = Arm(implementation="sdpa (twin)")
    history = [
        converted(write(tmp_path / "old", started("sdpa", "sdpa (twin)")))[0],
        CellChecked(workload=WORKLOAD.id, implementation=twin.implementation, status=Status.ok),
        expected(twin, PROBE),
    ]
    with Journal(tmp_path / "run") as journal:
        for event in history:
            journal.append(event)
    assert not older.convert(tmp_path / "run" / JOURNAL)
    assert list(events(tmp_path / "run" / JOURNAL)) == history


@pytest.mark.parametrize(("axis", "value"), [("page_size", 16), ("cache_dtype", "float8_e4m3fn")])
def test_a_journal_from_before_pages_were_pools_is_read(tmp_path: Path, axis: str, value: int | str) -> None:
    paged = {"seq_len": 1, "kv_len": 64, "direction": "inference"}
    workload = msgspec.json.decode(msgspec.json.encode(paged | {axis: value}), type=Workload)
    plain = Workload(**paged)
    journals.write(tmp_path / "run", (workload, plain), ("sdpa", "fused"))
    results = read(tmp_path / "run")
    assert {record.workload for record in results.records} == {workload, plain}
    assert titles.title(workload.axes()) != titles.title(plain.axes())
