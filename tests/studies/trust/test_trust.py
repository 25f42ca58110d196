"""The corpus, the judgement of a session, and the end of all its processes. Times decide nothing here."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from studies.trust import corpus, outcome, sessions
from studies.trust.__main__ import controls
from studies.trust.outcome import Clean, Row
from studies.trust.sessions import Cell, Session

CASES = corpus.cases()


def test_the_corpus_is_as_large_as_was_asked_for_and_each_source_defines_its_candidate() -> None:
    cheats = Counter(case.group for case in CASES if case.is_cheat)
    assert set(cheats) == {corpus.SKIPPED, corpus.REPLACED, corpus.SABOTAGED, corpus.CHANGED}
    assert sum(cheats.values()) >= 50
    assert min(cheats.values()) >= 10
    assert sum(case.is_contamination for case in CASES) >= 50
    assert len({case.id for case in CASES}) == len(CASES)
    for case in CASES:
        assert "attend" in compile(case.source, case.id, "exec").co_names, case.id
        assert case.words, case.id
        assert case.does.endswith("."), case.id


@pytest.mark.parametrize(
    ("when", "changes"),
    [("import", [1, 1, 1, 1]), ("forward", [0, 1, 1, 1]), ("backward", [0, 0, 0, 1]), ("timed", [0, 0, 0, 0])],
)
def test_a_change_is_made_at_its_moment_and_once(when: str, changes: list[int]) -> None:
    """Before, after two calls and after a backward pass."""
    names: dict[str, Any] = {"changes": []}
    source = f"{corpus.prelude()}\nCHANGE = 'changes.append(1)'\n{corpus.ONCE}{corpus.WRAPPERS[when]}"
    exec(source, names)  # noqa: S102 - our own source
    query, seen = torch.randn(1, 1, 4, 4, requires_grad=True), [len(names["changes"])]
    for _ in range(2):
        output = names["attend"](query, query, query)
        seen.append(len(names["changes"]))
    output.sum().backward()
    assert [*seen, len(names["changes"])] == changes


def _cell(latency_s: float | None = 1.0, ratio: float | None = 1.0, status: str = "ok", message: str = "") -> Cell:
    return Cell(status=status, message=message, latency_s=latency_s, ratio=ratio)


def _session(case: Cell, **others: Cell) -> Session:
    usual = {"sdpa": _cell(ratio=None), "fused": _cell(), "chunked": _cell()}
    return Session(cells={"case": case} | usual | others)


CLEAN = Clean(sessions=(_session(_cell(2.0, 2.0)), _session(_cell(2.2, 2.1))))


def _row(session: Session, *, is_timeable: bool = True) -> Row:
    case = corpus.Case(id="x", group="g", does="Does.", source="", words=("cache",), is_timeable=is_timeable)
    return outcome.row(case, session, CLEAN)


@pytest.mark.parametrize(
    ("cell", "is_timeable", "outcome", "is_good"),
    [
        (_cell(2.0, 2.0), False, "TIME GIVEN WRONGLY", False),  # any time of skipped work is wrong
        (_cell(2.1, 2.0), True, "true time", True),
        (_cell(0.2, 2.0), True, "TIME GIVEN WRONGLY", False),
        (_cell(2.0, 1.5), True, "TIME GIVEN WRONGLY", False),
        (_cell(None, None, "disagrees", "its answers come from a Cache"), False, "no time", True),
        (_cell(None, None, "disagrees", "its answers come from threads"), False, "no time", False),
    ],
)
def test_a_true_time_is_good_and_a_reason_that_names_the_effect(cell, is_timeable, outcome, is_good) -> None:
    row = _row(_session(cell), is_timeable=is_timeable)
    assert (row.outcome, row.is_good) == (outcome, is_good)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (_cell(None, None, "crashed"), "fused is crashed"),
        (_cell(None, None), "fused has no time"),
        (_cell(10.0, 1.0), "fused: 10 of its time"),
        (_cell(1.0, 1.6), "fused: 1.6 of its ratio"),
    ],
)
def test_a_bystander_that_changed_is_named(changed: Cell, said: str) -> None:
    row = _row(_session(_cell(2.0, 2.0), fused=changed))
    assert row.changed_bystanders == said
    assert not row.is_good


def test_a_run_that_is_lost_is_no_success() -> None:
    row = _row(Session(cells={}, lost="it hung"))
    assert (row.outcome, row.reason) == ("RUN LOST", "it hung")
    assert "sdpa is missing" in row.changed_bystanders


def test_each_clean_session_is_judged_by_the_others() -> None:
    odd = _session(_cell(2.0, 2.0), fused=_cell(1.0, 3.0))
    clean = Clean(sessions=(*CLEAN.sessions, odd))
    assert [row.changed_bystanders for row in controls(clean, "usual")] == ["", "", "fused: 3 of its ratio"]


def test_a_command_ends_with_all_that_it_started(tmp_path: Path) -> None:
    starts = "setsid sleep 300 &"  # a shell starts at once, on a busy machine too
    assert sessions.call(["sh", "-c", starts], tmp_path, 60)[0] == 0
    code, _, num_left = sessions.call(["sh", "-c", f"{starts} exec sleep 300"], tmp_path, 3.0)
    assert code is None
    assert num_left == 2


@pytest.mark.long
def test_a_clean_session_has_times_for_all() -> None:
    found = sessions.run(corpus.clean(), {"seq_len": 64}, short=True)
    assert found.lost == ""
    assert {name: cell.status for name, cell in found.cells.items()} == dict.fromkeys(
        ("case", "sdpa", "fused", "chunked"), "ok"
    )
