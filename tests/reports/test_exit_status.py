"""The end of every command: table, sentence and exit code come from the same marks, in every combination."""

import dataclasses
import inspect
import itertools
from typing import get_args

import msgspec
import pytest
import typer

from attnbench.analysis.conclusion import (
    HOW_FAST,
    IS_RIGHT,
    TIMED,
    WHICH_ONE,
    WORSE,
    Conclusion,
    Ending,
    Mark,
    conclude,
    factor,
    mark,
)
from attnbench.commands import frame, model
from attnbench.models.records import Difference, Judged
from attnbench.plugins import plugs
from attnbench.reports import answers, exit_status
from attnbench.storage.records import CheckVerdict, Status, Verdict
from tests import journals
from tests.analysis.gate.test_sides import measured, planned

CASES = list(itertools.product(CheckVerdict, (None, *Verdict), (False, True), (False, True)))
BY_COMMAND = {"check": IS_RIGHT, "run": HOW_FAST, "fastest": WHICH_ONE, "compare": WORSE}
CODES = {
    "check": {"WRONG": 1, "keeps memory": 1, "failed": 3, "judged in part": 3, "not judged": 3},
    "run": {"WRONG": 1, "failed": 1, "not judged": 3},
    "fastest": {"WRONG": 1, "failed": 1, "not judged": 3, "undecided": 3, "doubtful": 3},
    "compare": {"WRONG": 1, "failed": 1, "not judged": 3, "undecided": 3, "slower": 1, "doubtful": 4},
}
"""The exit code of each mark alone; any other passes."""


def shown(correct: CheckVerdict, speed: Verdict | None, *, is_doubtful: bool, has_failed: bool) -> str:
    """Return the texts that must appear, derived independently of the code."""
    if correct == "WRONG":
        return "WRONG"
    if has_failed:
        return "failed"
    if correct == "not judged":
        return "not judged"
    if speed is None:
        return str(correct)
    return "doubtful" if is_doubtful else {"equivalent": "equal"}.get(speed, str(speed))


@pytest.mark.parametrize("command", CODES)
@pytest.mark.parametrize(("correct", "speed", "is_doubtful", "has_failed"), CASES)
def test_table_sentence_and_exit_code_agree(correct, speed, is_doubtful, has_failed, command, capsys):
    found = mark(correct, speed, is_doubtful=is_doubtful, has_failed=has_failed)
    assert found == shown(correct, speed, is_doubtful=is_doubtful, has_failed=has_failed)
    conclusion = conclude({"mine": found}, BY_COMMAND[command])
    assert str(found) in conclusion.sentence
    with pytest.raises(typer.Exit) as ends:
        frame.finish(conclusion)
    code = CODES[command].get(str(found), 0)
    assert ends.value.exit_code == code
    words = {0: "pass", 1: "fail", 3: "inconclusive", 4: "invalid session"}
    assert capsys.readouterr().out.startswith(f"{words[code]}: ")
    if is_doubtful or has_failed or correct == "WRONG":
        assert found not in TIMED - {Mark.doubtful}  # no verdict on a time


@pytest.mark.parametrize("command", CODES)
@pytest.mark.parametrize("pair", list(itertools.combinations(Mark, 2)))
def test_of_several_the_worst_decides_and_is_named(pair, command):
    one, other = pair
    found = conclude({"mine": one, "theirs": other}, BY_COMMAND[command])
    codes = [CODES[command].get(str(each), 0) for each in pair]
    if Mark.not_judged in pair and command == "run":
        codes = [CODES[command].get(str(each), 0) for each in pair if each is not Mark.not_judged]
    is_void = command == "compare" and TIMED.intersection(pair) == {Mark.doubtful}  # no time is left
    codes = [3 if code == 4 and not is_void else code for code in codes]
    urgency = [1, 4, 3, 0]
    assert frame.exit_code(found) == min(codes, key=urgency.index)
    assert str(one) in found.words
    assert str(other) in found.words
    for name, each in (("mine", one), ("theirs", other)):
        assert (name in found.words) == (each in BY_COMMAND[command])


@pytest.mark.parametrize("name", ["check", "compare", "fastest", "gate", "growth", "model"])
def test_each_command_ends_with_a_conclusion_that_the_frame_prints(name):
    returned = inspect.signature(plugs("attnbench.commands", "COMMAND")[name].function).return_annotation
    assert Conclusion in {returned, *get_args(returned)}


MODEL = {
    Mark.right: {},
    Mark.wrong: {"differences": (Difference(place="layer 0", batch="whole", error=1.0, allowed=0.1),)},
    Mark.failed: {"reason": "it raised"},
    Mark.not_judged: {"reason": "it has a window", "is_refused": True},
}


@pytest.mark.parametrize("trouble", ["", "no time"])
@pytest.mark.parametrize("pair", list(itertools.product(MODEL, repeat=2)))
def test_lines_sentence_and_exit_code_of_a_model_agree(pair, trouble):
    names = dict(zip(("mine", "theirs"), pair, strict=True))
    judged = {name: Judged(attention=name, **MODEL[kind]) for name, kind in names.items()}
    found = exit_status.of_model(judged, trouble)
    kinds = {*pair, *([Mark.failed] if trouble else [])}
    assert all(str(kind) in found.words for kind in kinds)
    assert frame.exit_code(found) == (1 if kinds & {Mark.wrong, Mark.failed} else 3 * (kinds == {Mark.not_judged}))
    assert all(str(kind) in model._verdict(judged[name]) for name, kind in names.items())


def test_nothing_judged_is_no_pass():
    for endings in BY_COMMAND.values():
        assert conclude({}, endings).ending is Ending.inconclusive
        assert conclude({"mine": Mark.not_judged}, endings).ending is Ending.inconclusive


def test_a_factor_is_one_or_more():
    assert factor(1.10, 1.05, 1.15) == "1.10x slower (1.05 to 1.15)"
    assert factor(0.5, 0.4, 0.625, than="sdpa") == "2.00x faster than sdpa (1.60 to 2.50)"
    assert factor(0.906) == "1.10x faster"


@pytest.mark.parametrize("names", [("sdpa", "fused"), ("sdpa", "fused", "liar"), ("sdpa",), ("sdpa", "torch_mha")])
def test_a_run_ends_as_the_marks_of_its_shapes_say(names, tmp_path):
    found = journals.write(tmp_path, journals.workloads(scope=("attention",), seq_len=(128, 512)), names)
    marks = {cell.mark for shape in answers.shapes(found) for cell in shape.others} - {None}
    expected = Ending.finding if Mark.wrong in marks else Ending.passed
    if names == ("sdpa", "torch_mha"):
        expected = Ending.inconclusive  # no pair was compared
    assert exit_status.of_run(found).ending is expected


def test_a_comparison_without_any_result_says_why(tmp_path):
    results = measured(tmp_path / "run", planned("x", budget_s=1.0))
    unsupported = [
        msgspec.structs.replace(record, status=Status.unsupported, message="it has mask=causal built in")
        for record in results.records
    ]
    end = exit_status.of_sides(dataclasses.replace(results, records=tuple(unsupported)))
    assert end.ending is Ending.inconclusive
    assert end.words == f"nothing could be judged: x: it has mask=causal built in ({len(unsupported)} cells)"
