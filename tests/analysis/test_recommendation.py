"""Recommendations from a stored run: limits, ties and texts."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.recommendation import compiles, recommend
from attnbench.analysis.results import Results
from attnbench.reports import recommended
from attnbench.storage.records import REPEATABLE, RuleResult, Status
from attnbench.units import show
from attnbench.workloads.workload import Workload
from tests import journals

POINT = Workload(seq_len=512, mask="causal", scope="attention", direction="forward")
NAMES = ("sdpa", "sdpa_flash", "fused", "einsum", "chunked")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return journals.write(tmp_path_factory.mktemp("chosen"), (POINT,), NAMES)


def test_equals_are_named_and_pytorch_s_own_is_preferred(results: Results) -> None:
    (found,) = recommend(results)
    assert found.choice == "sdpa"
    assert found.equals == ["sdpa_flash"]
    assert not found.is_clear
    said = recommended.answer(found)
    assert said.startswith("Take PyTorch's own choice, sdpa: it is as fast as sdpa_flash, within ")
    assert "faster than the next, " in said


def test_a_clear_winner_says_its_lead_over_the_next_and_over_pytorch(tmp_path: Path) -> None:
    run = journals.write(tmp_path, (POINT,), ("sdpa", "fused", "chunked"), slowdown=0.25)
    (found,) = recommend(run)
    assert found.choice == "chunked"
    said = recommended.answer(found)
    assert said.startswith("Take chunked: it is the fastest, ")
    assert "faster than the next, " in said
    assert "PyTorch's own choice, sdpa" in said


def test_what_is_not_deterministic_is_excluded_where_that_is_asked(results: Results) -> None:
    varies = RuleResult(rule=REPEATABLE, holds=False, found="two calls differ by 1e-7", is_noted=True)
    records = tuple(
        msgspec.structs.replace(each, agreement=msgspec.structs.replace(each.agreement, rules=(varies,)))
        if each.implementation == "sdpa" and each.agreement is not None
        else each
        for each in results.records
    )
    changed = dataclasses.replace(results, records=records)
    assert recommend(changed)[0].choice == "sdpa"
    (found,) = recommend(changed, is_deterministic=True)
    assert found.choice == "sdpa_flash"
    assert str(found.excluded["sdpa"]) == "not deterministic: two calls differ by 1e-7"


def test_nothing_left_is_said_with_the_least_that_would_do(results: Results) -> None:
    (found,) = recommend(results, memory_bytes=1)
    assert found.choice == ""
    least = min(found.peaks, key=lambda name: found.peaks[name])
    needed = show(found.peaks[least], "bytes")
    said = f"There is nothing to recommend: {least}, the implementation with the least memory, needs {needed}."
    assert recommended.answer(found) == said
    assert set(found.excluded) == set(NAMES)


def test_a_prediction_is_not_called_a_timeout(results: Results) -> None:
    timeout = {"status": Status.timeout}
    why = {
        "fused": timeout | {"is_predicted": True, "message": "predicted 9 s for one call"},
        "sdpa_flash": timeout | {"message": "no answer within 60 s"},
    }
    records = tuple(msgspec.structs.replace(each, **why.get(each.implementation, {})) for each in results.records)
    (found,) = recommend(dataclasses.replace(results, records=records))
    assert set(recommended.of_excluded(found)) == {
        "not tried, predicted to take too long: fused (predicted 9 s for one call)",
        "excluded, timed out: sdpa_flash (no answer within 60 s)",
    }
    assert any(line.endswith("no answer within 60 s") for line in recommended.of_excluded(found, is_verbose=True))


def test_a_long_first_call_has_paid_after_some_calls(tmp_path: Path) -> None:
    run = journals.write(tmp_path, (POINT,), ("sdpa", "fused", "chunked"), slowdown=0.25)
    (found,) = recommend(run)
    assert found.break_even is None
    assert "paid" not in recommended.answer(found)
    slow = dataclasses.replace(found, first_s={"sdpa": 0.1, "chunked": 5.1})
    saved_s = slow.seconds["sdpa"] - slow.seconds["chunked"]
    assert slow.break_even is not None
    assert slow.break_even.calls == pytest.approx(5 / saved_s, rel=0.01)
    text = f", and has paid for its first call of 5.10 s after {slow.break_even.words}."
    assert recommended.answer(slow).endswith(text)
    assert slow.facts()["break_even"] == slow.break_even
    short = dataclasses.replace(found, first_s={"sdpa": 0.0, "chunked": 9 * found.seconds["chunked"]})
    assert short.break_even is not None
    assert "paid" not in recommended.answer(short)
    assert "paid" in recommended.answer(dataclasses.replace(short, compiles=True))
    assert "paid" not in recommended.answer(dataclasses.replace(slow, first_s={"sdpa": 6.0, "chunked": 5.1}))


def test_names_and_the_catalogue_say_what_compiles() -> None:
    assert [compiles(each) for each in ("fused+compile", "flex", "fused", "mine.py:flex")] == [True, True, False, False]
