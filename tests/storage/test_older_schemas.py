"""Older journals: arms that were names until schema 3, and axes that are gone, become today's events.

tests/analysis/test_golden.py has the verdicts of such journals.
"""

import json
import re
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.reports import titles
from attnbench.storage.events import SCHEMA, ArmSamples, CellChecked, DamagedError, RunStarted, VisitFinished
from attnbench.storage.journal import JOURNAL, Journal, events
from attnbench.storage.records import BASE, CANDIDATE, LATENCY, PROBE, Arm, Role, Sample, Status
from attnbench.workloads.workload import Workload
from tests import journals

WORKLOAD = Workload(seq_len=8)
Line = dict[str, object]
SDPA, ODD, FUSED = (Arm(implementation=name) for name in ("sdpa", "odd (twin)", "fused"))
PLAN = {"sweep": "quick", "workloads": [msgspec.to_builtins(WORKLOAD)], "baseline": "sdpa", "metrics": ["latency"]}
PLAN |= {"budget_s": 60.0, "call_limit_s": 5.0, "timeout_s": 30.0, "memory_limit_bytes": 0}


def started(*specs: str, schema: int = 3, **changes) -> Line:
    """Build the first line of a run of these implementations."""
    plan = {**PLAN, "implementations": specs, **changes}
    return {"type": "run_started", "schema": schema, "run": "old", "time": "", "commit": "abc", "plan": plan}


def control(arm: Arm) -> Arm:
    """Return the arm once more, as old runs had it."""
    return msgspec.structs.replace(arm, role=Role.control)


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


def expected(*arms: Arm, number: int = 0) -> VisitFinished:
    """Return the event that `visit` should become."""
    samples = (Sample(1e-3 * (1 + slot), 4, visit=number, slot=slot) for slot in range(len(arms)))
    taken = (ArmSamples(arm=arm, samples=(sample,)) for arm, sample in zip(arms, samples, strict=True))
    return VisitFinished(workload=WORKLOAD.id, epoch=0, visit=number, arms=tuple(taken))


@pytest.mark.parametrize("baseline", [SDPA, ODD])
def test_the_baseline_has_a_control_and_a_name_that_ends_alike_is_a_name(tmp_path: Path, baseline: Arm) -> None:
    lines = (
        started("sdpa", "odd (twin)=odd.py:f", baseline=baseline.implementation),
        *map(checked, ("sdpa", "odd (twin)")),
        visit("odd (twin)", "(canary)", f"{baseline.implementation} (twin)", "sdpa"),
    )
    first, *cells, taken = events(write(tmp_path, *lines))
    assert isinstance(first, RunStarted)
    assert first.schema == 3
    assert first.plan.specs == {SDPA: "sdpa", ODD: "odd (twin)=odd.py:f"}
    assert [cell.key for cell in cells if isinstance(cell, CellChecked)] == [(WORKLOAD.id, SDPA), (WORKLOAD.id, ODD)]
    assert taken == expected(ODD, PROBE, control(baseline), SDPA)


@pytest.mark.parametrize("is_apart", [True, False])
def test_of_two_sides_each_name_becomes_an_implementation_and_its_side(tmp_path: Path, *, is_apart: bool) -> None:
    sides = {"base": {"given": "rev:old"}, "candidate": {"given": "rev:new"}, "is_apart": is_apart}
    named = [] if is_apart else ["x (twin)=new/x.py:g"]  # a candidate has a control only in processes of its own
    lines = (
        started("x (base)=old/x.py:f", "x=new/x.py:f", "y=sdpa", *named, baseline="x (base)", sides=sides),
        checked("x (base)"),
        visit("x (twin)", "x (base) (twin)", "(canary)", "x (base)"),
    )
    first, cell, taken = events(write(tmp_path, *lines))
    assert isinstance(first, RunStarted)
    assert isinstance(cell, CellChecked)
    base, new = Arm(implementation="x", side=BASE), Arm(implementation="x", side=CANDIDATE)
    odd = control(new) if is_apart else Arm(implementation="x (twin)", side=CANDIDATE)
    specs = {base: "old/x.py:f", new: "new/x.py:f", Arm(implementation="y", side=CANDIDATE): "sdpa"}
    assert first.plan.specs == (specs if is_apart else specs | {odd: "new/x.py:g"})
    assert (first.plan.implementations, first.plan.baseline, cell.key) == ((), "", (WORKLOAD.id, base))
    assert taken == expected(odd, control(base), PROBE, base)


def test_a_journal_that_was_gone_on_with_has_lines_of_both_schemas(tmp_path: Path) -> None:
    write(tmp_path, started("sdpa", "fused"), checked("sdpa"), visit("sdpa", "sdpa (twin)", "(canary)"))
    later = [
        CellChecked(workload=WORKLOAD.id, implementation="fused", status=Status.ok),
        expected(FUSED, control(SDPA), PROBE, SDPA, number=1),
    ]
    with Journal(tmp_path) as journal:
        for event in later:
            journal.append(event)
    assert list(events(tmp_path / JOURNAL))[2:] == [expected(SDPA, control(SDPA), PROBE), *later]
    sdpa, fused = read(tmp_path).records
    assert [len(sdpa.samples(LATENCY)), len(fused.samples(LATENCY))] == [2, 1]  # no controls: they have no use today


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
        list(events(journal))


def test_todays_journals_are_not_taken_for_old_ones(tmp_path: Path) -> None:
    twin = Arm(implementation="sdpa (twin)")
    first = next(events(write(tmp_path / "old", started("sdpa", "sdpa (twin)"))))
    assert isinstance(first, RunStarted)
    history = [
        msgspec.structs.replace(first, schema=SCHEMA),
        CellChecked(workload=WORKLOAD.id, implementation=twin.implementation, status=Status.ok),
        expected(twin, PROBE),
    ]
    with Journal(tmp_path / "run") as journal:
        for event in history:
            journal.append(event)
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
