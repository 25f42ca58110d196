"""Journals of schema 3, whose arms were names: they become today's events, with any other content of the file."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.storage.events import (
    SCHEMA,
    ArmSamples,
    CellChecked,
    CellFailed,
    CellMeasured,
    CellProfiled,
    DamagedError,
    Event,
    RunStarted,
    VisitFinished,
)
from attnbench.storage.journal import JOURNAL, Journal, events
from attnbench.storage.records import BASE, CANDIDATE, CONTROL_LATENCY, LATENCY, PROBE, Arm, Sample, Status
from attnbench.workloads.workload import Workload

WORKLOAD = Workload(seq_len=8)
Line = dict[str, object]
SDPA, ODD = Arm(implementation="sdpa"), Arm(implementation="odd (twin)")
X, X_BASE = Arm(implementation="x", side=CANDIDATE), Arm(implementation="x", side=BASE)


def started(*specs: str, schema: int = 3, **changes) -> Line:
    """Build the first line of a run of these implementations."""
    plan = {
        "sweep": "quick",
        "workloads": [json.loads(msgspec.json.encode(WORKLOAD))],
        "implementations": specs,
        "baseline": "sdpa",
        "metrics": ["latency"],
        "budget_s": 60.0,
        "call_limit_s": 5.0,
        "timeout_s": 30.0,
        "memory_limit_bytes": 0,
    }
    return {"type": "run_started", "schema": schema, "run": "old", "time": "", "commit": "abc", "plan": plan | changes}


def sided(*specs: str, is_apart: bool = False) -> Line:
    """Build the first line of a run that compared two versions of these implementations."""
    sides = {
        "base": {"given": "rev:old", "commit": "b", "root": "runs/1/sides/base"},
        "candidate": {"given": "rev:new", "commit": "c", "root": "runs/1/sides/candidate"},
        "is_apart": is_apart,
    }
    return started(*specs, baseline=specs[0].partition("=")[0], sides=sides)


def checked(name: str) -> Line:
    return {"type": "cell_checked", "workload": WORKLOAD.id, "implementation": name, "status": "ok"}


def visit(*names: str, number: int = 0) -> Line:
    """Build a visit of one block; the value of a sample identifies its arm."""
    arms = {name: [[1e-3 * (1 + slot), 4, 0, number, 0, slot]] for slot, name in enumerate(names)}
    return {"type": "visit_finished", "workload": WORKLOAD.id, "epoch": 0, "visit": number, "arms": arms}


def write(folder: Path, *lines: Line) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (folder / JOURNAL).write_text(text, encoding="utf-8")
    return folder / JOURNAL


def decoded(folder: Path, *lines: Line) -> list[Event]:
    return list(events(write(folder, *lines)))


def expected(*arms: Arm, number: int = 0) -> VisitFinished:
    """Return the events that `visit` should become."""
    samples = (Sample(1e-3 * (1 + slot), 4, visit=number, slot=slot) for slot in range(len(arms)))
    taken = (ArmSamples(arm=arm, samples=(sample,)) for arm, sample in zip(arms, samples, strict=True))
    return VisitFinished(workload=WORKLOAD.id, epoch=0, visit=number, arms=tuple(taken))


def test_of_one_state_the_baseline_has_a_control_and_a_name_that_ends_alike_is_a_name(tmp_path: Path) -> None:
    first, *cells, taken = decoded(
        tmp_path,
        started("sdpa", "odd (twin)=odd.py:f"),
        *map(checked, ("sdpa", "odd (twin)")),
        visit("odd (twin)", "(canary)", "sdpa (twin)", "sdpa"),
    )
    assert isinstance(first, RunStarted)
    assert first.schema == 3
    assert first.plan.specs == {SDPA: "sdpa", ODD: "odd (twin)=odd.py:f"}
    assert first.plan.reference(ODD) == SDPA
    assert [cell.key for cell in cells if isinstance(cell, CellChecked)] == [(WORKLOAD.id, SDPA), (WORKLOAD.id, ODD)]
    assert taken == expected(ODD, PROBE, SDPA.as_control(), SDPA)


def test_a_baseline_whose_own_name_ends_alike_has_a_control(tmp_path: Path) -> None:
    _, taken = decoded(
        tmp_path, started("sdpa", "odd (twin)", baseline="odd (twin)"), visit("odd (twin) (twin)", "odd (twin)", "sdpa")
    )
    assert taken == expected(ODD.as_control(), ODD, SDPA)


def test_of_two_sides_each_name_becomes_an_implementation_and_its_side(tmp_path: Path) -> None:
    first, *cells, taken = decoded(
        tmp_path,
        sided("x (base)=old/x.py:f", "x=new/x.py:f", "lost (base)=old/lost.py:f", "y=sdpa"),
        *map(checked, ("x (base)", "x", "lost (base)", "y")),
        visit("x", "x (base) (twin)", "(canary)", "x (base)"),
    )
    assert isinstance(first, RunStarted)
    plan = first.plan
    assert (plan.implementations, plan.baseline) == ((), "")
    assert plan.sides is not None
    assert plan.sides.base.implementations == {"x": "old/x.py:f", "lost": "old/lost.py:f"}
    assert plan.sides.candidate.implementations == {"x": "new/x.py:f", "y": "sdpa"}
    assert plan.reference(X) == X_BASE
    assert (first.commit_of(X_BASE), first.commit_of(X)) == ("b", "c")
    lost, new = Arm(implementation="lost", side=BASE), Arm(implementation="y", side=CANDIDATE)
    assert [cell.key[1] for cell in cells if isinstance(cell, CellChecked)] == [X_BASE, X, lost, new]
    assert list(plan.specs) == [X_BASE, X, lost, new]
    assert taken == expected(X, X_BASE.as_control(), PROBE, X_BASE)


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_candidate_has_a_control_where_each_side_has_processes_of_its_own_and_else_a_name(
    tmp_path: Path, *, is_apart: bool
) -> None:
    named = () if is_apart else ("x (twin)=new/x.py:g",)
    first = sided("x (base)=old/x.py:f", "x=new/x.py:f", *named, is_apart=is_apart)
    _, taken = decoded(tmp_path, first, visit("x (twin)", "x (base) (twin)", "x", "x (base)"))
    odd = X.as_control() if is_apart else Arm(implementation="x (twin)", side=CANDIDATE)
    assert taken == expected(odd, X_BASE.as_control(), X, X_BASE)


def test_every_event_of_a_cell_gets_its_side(tmp_path: Path) -> None:
    where = {"workload": WORKLOAD.id, "implementation": "x (base)"}
    measurement = {"metric": "peak_memory", "unit": "bytes", "samples": [[64.0]]}
    _, *cells = decoded(
        tmp_path,
        sided("x (base)=old/x.py:f", "x=new/x.py:f"),
        checked("x (base)"),
        {"type": "cell_profiled", **where, "operators": {"calls": []}},
        {"type": "cell_measured", **where, "measurement": measurement},
        {"type": "cell_failed", **where, "status": "crashed", "message": "gone"},
    )
    assert [type(cell) for cell in cells] == [CellChecked, CellProfiled, CellMeasured, CellFailed]
    assert {cell.key for cell in cells if isinstance(cell, CellChecked | CellProfiled | CellMeasured | CellFailed)} == {
        (WORKLOAD.id, X_BASE)
    }


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_a_journal_that_was_gone_on_with_has_lines_of_both_schemas(tmp_path: Path, schema: int) -> None:
    journal = write(
        tmp_path, started("sdpa", "fused", schema=schema), checked("sdpa"), visit("sdpa", "sdpa (twin)", "(canary)")
    )
    fused = Arm(implementation="fused")
    with Journal(tmp_path) as more:
        more.append(CellChecked(workload=WORKLOAD.id, implementation="fused", status=Status.ok))
        more.append(expected(fused, SDPA.as_control(), PROBE, SDPA, number=1))
    assert list(events(journal))[2:] == [
        expected(SDPA, SDPA.as_control(), PROBE),
        CellChecked(workload=WORKLOAD.id, implementation="fused", status=Status.ok),
        expected(fused, SDPA.as_control(), PROBE, SDPA, number=1),
    ]
    records = {record.implementation: record for record in read(tmp_path).records}
    for metric, num_samples in ((LATENCY, 2), (CONTROL_LATENCY, 2)):
        found = records["sdpa"].measurement(metric)
        assert found is not None
        assert len(found.samples) == num_samples
    assert records["fused"].measurement(LATENCY) is not None
    assert records["fused"].measurement(CONTROL_LATENCY) is None


def test_two_sides_that_were_gone_on_with_keep_their_sides(tmp_path: Path) -> None:
    write(tmp_path, sided("x (base)=old/x.py:f", "x=new/x.py:f"), checked("x (base)"), visit("x (base)", "x"))
    with Journal(tmp_path) as more:
        more.append(CellChecked(workload=WORKLOAD.id, implementation="x", side=CANDIDATE, status=Status.ok))
        more.append(
            CellFailed(workload=WORKLOAD.id, implementation="x", side=BASE, status=Status.crashed, message="gone")
        )
        more.append(expected(X, X_BASE, number=1))
    found = {record.arm: record for record in read(tmp_path).records}
    assert {arm: record.status for arm, record in found.items()} == {X: Status.ok, X_BASE: Status.crashed}
    latency = found[X].measurement(LATENCY)
    assert latency is not None
    assert [sample.value for sample in latency.samples] == [2e-3, 1e-3]


@pytest.mark.parametrize(
    "damaged",
    [
        '{"type":"visit_finished","workload":"w","epoch":0,"visit":0,"arms":{"sdpa":[["slow"]]}}',
        '{"type":"visit_finished","workload":"w","epoch":0,"visit":0}',
        '{"type":"visit_finished","workload":"w","epoch":0,"visit":0,"arms":{"sdpa":[[0.0',
        '{"type":"visit_finished","workload":"w","epoch":0,"visit":0,"arms":[["sdpa",[]]]}',
        '{"workload":"w"}',
        '["visit_finished"]',
        "7",
        "",
    ],
)
def test_a_damaged_line_is_named_with_its_file(tmp_path: Path, damaged: str) -> None:
    journal = write(tmp_path, started("sdpa"), checked("sdpa"))
    journal.write_text(journal.read_text(encoding="utf-8") + damaged + "\n", encoding="utf-8")
    with pytest.raises(DamagedError, match=rf"^{re.escape(str(journal))}, line 3: not an event of a journal \("):
        list(events(journal))


@pytest.mark.parametrize(
    "damaged",
    [
        '{"type":"run_started","schema":3,"run":"old"',
        '{"type":"run_started","schema":3,"run":"old"}',
        '{"type":"run_started","schema":3,"run":"old","plan":7}',
        '{"type":"run_started","schema":3,"run":"old","plan":{}}',
    ],
)
def test_a_first_line_that_is_damaged_is_named_too(tmp_path: Path, damaged: str) -> None:
    journal = tmp_path / JOURNAL
    journal.write_text(damaged + "\n", encoding="utf-8")
    with pytest.raises(DamagedError, match="line 1: not an event of a journal"):
        list(events(journal))


def test_two_sides_of_which_one_is_missing_are_damage(tmp_path: Path) -> None:
    first = started("x (base)=old/x.py:f", "x=new/x.py:f", sides={"base": {"given": "rev:old"}})
    with pytest.raises(DamagedError, match="line 1: not an event of a journal"):
        decoded(tmp_path, first)


def test_todays_journals_are_not_taken_for_old_ones(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = decoded(tmp_path / "old", started("sdpa", "sdpa (twin)"))[0]
    assert isinstance(first, RunStarted)
    history = [
        msgspec.structs.replace(first, schema=SCHEMA),
        CellChecked(workload=WORKLOAD.id, implementation="sdpa (twin)", status=Status.ok),
        expected(Arm(implementation="sdpa (twin)"), PROBE),
    ]
    with Journal(folder) as journal:
        for event in history:
            journal.append(event)
    assert list(events(folder / JOURNAL)) == history
