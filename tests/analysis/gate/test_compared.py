"""Compared cells: those ok on both sides, and failures, which are known if both sides have them."""

from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.gate.decision import judge
from attnbench.analysis.gate.rulings import Kind, Outcome
from attnbench.analysis.results import Results
from attnbench.storage.events import CellChecked
from attnbench.storage.records import Status
from tests.analysis.gate import scripts
from tests.analysis.gate.scripts import ends, holds, run

MESSAGES = {
    "another error": (
        "ImportError: no module (mine.py, line 3)",
        "IndexError: no index (mine.py, line 3)",
        Kind.changed,
    ),
    "another line": ("ValueError: no (mine.py, line 3)", "ValueError: no (mine.py, line 41)", Kind.failed),
    "another address": ("TypeError: <T at 0x7f3acc10>", "TypeError: <T at 0x55d1f0>", Kind.failed),
    "another folder": ("ImportError: x in /a/base/y.py", "ImportError: x in /b/candidate/y.py", Kind.failed),
}


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("name", MESSAGES)
def test_what_fails_as_before_says_the_same_whatever_its_numbers(name: str, is_checked: bool, tmp_path: Path) -> None:  # noqa: FBT001
    *messages, kind = MESSAGES[name]
    changes = [scripts.fails(reported) if is_checked else ends(Status.error, reported) for reported in messages]
    before, after = (run(tmp_path / str(number), change) for number, change in enumerate(changes))
    (found,) = [ruling for ruling in judge(before, after).rulings if ruling.base == Status.error]
    assert (found.metric, found.kind) == ("status", kind)


def disagrees(mistake: str, diagnosis: str) -> scripts.Change:
    """Make `fused` on the first workload wrong by a mistake."""

    def change(event):
        if scripts.is_cell(event, "fused") and isinstance(event, CellChecked):
            wrong = msgspec.structs.replace(event.agreement, diagnosis=diagnosis, mistakes=(mistake,), step="")
            return msgspec.structs.replace(event, status=Status.disagrees, message=diagnosis, agreement=wrong)
        return ends(Status.disagrees)(event)

    return change


@pytest.mark.parametrize(("after", "kind"), [("late_mask", Kind.failed), ("no_scale", Kind.changed)])
def test_wrong_answers_are_distinguished_by_their_mistakes(after: str, kind: Kind, tmp_path: Path) -> None:
    reported = (disagrees("late_mask", "wrong by 2.9"), disagrees(after, "wrong by 3.1"))
    both = [run(tmp_path / str(number), change) for number, change in enumerate(reported)]
    (found,) = [ruling for ruling in judge(*both).rulings if ruling.base == Status.disagrees]
    assert found.kind is kind


def test_runs_without_times_are_compared_in_what_they_have(tmp_path: Path) -> None:
    before, after = (run(tmp_path / name, scripts.untimed) for name in ("before", "after"))
    assert judge(before, after).outcome is Outcome.passed
    grown = run(tmp_path / "grown", scripts.untimed, holds(2**30))
    assert {ruling.kind for ruling in judge(before, grown).of(Outcome.finding)} == {Kind.grown}


@pytest.mark.parametrize(("status", "more"), [(Status.error, {}), (Status.timeout, {"is_predicted": True})])
def test_where_no_cell_is_ok_on_both_sides_nothing_could_be_compared(tmp_path: Path, status, more) -> None:
    before, after = (run(tmp_path / name, scripts.all_end(status, **more)) for name in ("before", "after"))
    assert judge(before, after).outcome is Outcome.inconclusive


def test_a_prediction_is_no_loss_and_no_pass(base: Results, tmp_path: Path) -> None:
    assert judge(base, run(tmp_path / "run", ends(Status.timeout, is_predicted=True))).outcome is Outcome.inconclusive
