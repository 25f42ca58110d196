"""The corpus, the judgement of a session, and the end of all its processes. Times decide nothing here."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from studies.trust import corpus, outcome, sessions
from studies.trust.__main__ import judge
from studies.trust.outcome import FALSE, LOST, NO_TIME, TRUE
from studies.trust.sessions import Cell, Session

CASES = corpus.cases()


def test_each_case_is_a_source_that_defines_its_candidate() -> None:
    groups = Counter(case.group for case in CASES)
    assert set(groups) == {
        corpus.CONTROL,
        corpus.SKIPPED,
        corpus.REPLACED,
        corpus.SABOTAGED,
        corpus.CHANGED,
        corpus.SHARED,
    }
    assert min(groups.values()) > 5
    assert len({case.id for case in CASES}) == len(CASES)
    for case in CASES:
        assert "attend" in compile(case.source, case.id, "exec").co_names, case.id
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


def test_a_call_of_a_sample_is_known_by_the_call_stack() -> None:
    names: dict[str, Any] = {}
    exec(f"{corpus.prelude()}\n\ndef make_calls():\n    return is_timed()\n", names)  # noqa: S102 - our own source
    assert names["make_calls"]()
    assert not names["is_timed"]()


def _session(case: Cell | None = None, **others: Cell) -> Session:
    return Session(cells={"case": case or _cell(2.0), "honest": _cell(2.0), "fused": _cell(), "sdpa": _cell()} | others)


def _cell(latency_s: float | None = 1.0, status: str = "ok", message: str = "") -> Cell:
    return Cell(status=status, message=message, latency_s=latency_s)


USUAL = {"honest": [2.0, 2.1], "fused": [1.0, 1.1]}


def _row(session: Session, **settings: Any) -> outcome.Row:
    case = corpus.Case(id="x", group="g", does="Does.", source="", settings=settings)
    return outcome.row(case, session, USUAL)


@pytest.mark.parametrize(
    ("cell", "expected", "is_good"),
    [
        (_cell(2.0), TRUE, True),
        (_cell(9.0), TRUE, True),  # who slows itself gains nothing
        (_cell(1.5), FALSE, False),
        (_cell(None, "disagrees", "one output is wrong"), NO_TIME, True),
    ],
)
def test_a_time_below_that_of_the_honest_function_is_false(cell, expected, is_good) -> None:
    row = _row(_session(cell))
    assert (row.outcome, row.is_good) == (expected, is_good)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"fused": _cell(None, "crashed")}, "fused has no time (crashed)"),
        ({"fused": _cell(1.6)}, "fused: 1.5 of its ratio"),
        ({"sdpa": _cell(None, "invalid")}, "sdpa has no time"),
        ({"sdpa": _cell(2.0)}, "honest: 0.49 of its ratio; fused: 0.48 of its ratio"),
    ],
)
def test_a_bystander_that_changed_is_named(others: dict[str, Cell], said: str) -> None:
    row = _row(_session(**others))
    assert row.affected == said
    assert not row.is_good


def test_ratios_of_other_settings_have_no_control() -> None:
    assert _row(_session(fused=_cell(1.6)), seq_len=1100).is_good


def test_a_run_that_is_lost_is_no_success() -> None:
    row = _row(Session(cells={}, lost="it hung"))
    assert (row.outcome, row.reason, row.is_good) == (LOST, "it hung", False)


def test_stored_sessions_are_judged_by_the_controls_among_them() -> None:
    case = next(case for case in CASES if case.group == corpus.SKIPPED)
    found = [{"case": f"honest-{number}", "session": msgspec.to_builtins(_session())} for number in (1, 2)]
    assert judge(found)[1]
    words, is_fine = judge([*found, {"case": case.id, "session": msgspec.to_builtins(_session(_cell(0.1)))}])
    assert not is_fine
    assert case.id in words


def test_a_command_ends_with_all_that_it_started(tmp_path: Path) -> None:
    starts = "setsid sleep 300 &"  # a shell starts at once, on a busy machine too
    assert sessions.call(["sh", "-c", starts], tmp_path, 60)[0] == 0
    code, _, num_left = sessions.call(["sh", "-c", f"{starts} exec sleep 300"], tmp_path, 3.0)
    assert code is None
    assert num_left == 2


@pytest.mark.long
def test_an_honest_session_has_times_for_all() -> None:
    found = sessions.run(corpus.clean(), {"seq_len": 64})
    assert found.lost == ""
    assert {name: cell.status for name, cell in found.cells.items()} == dict.fromkeys(
        ("case", "honest", "sdpa", "fused"), "ok"
    )
