"""A verdict states its coverage, and rests on enough cells or says that it does not."""

import msgspec
import pytest

from attnbench.analysis.conclusion import Ending
from attnbench.analysis.judgements import MANY_CELLS, Judgement
from attnbench.reports import exit_status
from attnbench.storage.records import (
    CONVENTIONS,
    KEPT_MEMORY,
    Agreement,
    CheckVerdict,
    Measurement,
    ProbeResult,
    Record,
    RuleResult,
    Sample,
    Status,
    TensorError,
)
from attnbench.workloads.workload import Workload

PLANNED = tuple(
    Workload(seq_len=length, num_heads=4, num_kv_heads=groups, head_dim=8, mask=mask)
    for length in (8, 300)
    for groups in (4, 2)
    for mask in ("none", "causal", "alibi")
)


PLACE = {"run": "r", "time": "t", "commit": "c", "implementation": "mine", "environment": None}


def agreement(*, error: float | None = 0.1, found: str = "", conventions: tuple[str, ...] = ()) -> Agreement:
    actual = None if error is None else 1.0 + error
    sizes = {"allowed": 1.0, "worst": (0,), "expected": 1.0, "largest": 1.0}
    output = TensorError(tensor="output", error=error, actual=actual, **sizes)
    rules = (RuleResult(rule="hidden NaN", holds=False, found=found, is_noted=True),) if found else ()
    probes = (ProbeResult(probe="normal", tensors=(output,)),)
    return Agreement(probes=probes, rules=rules, conventions=conventions)


def judgement(
    *statuses: Status, planned: tuple[Workload, ...] = PLANNED, **details: str | tuple[str, ...]
) -> Judgement:
    """Judge one record for each of the first planned cells."""
    records = []
    for workload, status in zip(planned, statuses, strict=False):
        error = 3.0 if status is Status.disagrees else 0.1
        is_judged = status in {Status.ok, Status.disagrees, Status.approximate}
        judged = agreement(error=error, **details) if is_judged else None  # type: ignore[arg-type]
        found = {"status": status, "message": f"{status} here", "agreement": judged}
        records.append(Record(**PLACE, workload=workload, **found))  # type: ignore[arg-type]
    return Judgement(implementation="mine", records=tuple(records), planned=planned)


OK, UNSUPPORTED = Status.ok, Status.unsupported


@pytest.mark.parametrize(
    ("statuses", "verdict", "ending", "words"),
    [
        ([OK] * 12, CheckVerdict.right, Ending.passed, "right on 12 of 12 cells"),
        ([OK] * 4 + [UNSUPPORTED] * 8, CheckVerdict.right, Ending.passed, "right on 4 of 12 cells"),
        ([OK] * 3 + [UNSUPPORTED] * 9, CheckVerdict.right, Ending.inconclusive, "a verdict needs 4 cells"),
        ([OK] * 11 + [Status.timeout], CheckVerdict.right, Ending.inconclusive, "timeout"),
        ([OK] * 5 + [Status.disagrees, Status.crashed], CheckVerdict.wrong, Ending.finding, "WRONG on 1 of 6 cells"),
        ([Status.error], CheckVerdict.not_judged, Ending.inconclusive, "not judged"),
        ([UNSUPPORTED], CheckVerdict.not_judged, Ending.inconclusive, "unsupported here"),
    ],
)
def test_verdict_ending_and_words_follow_from_the_cells(statuses, verdict, ending, words) -> None:
    judged = judgement(*statuses)
    assert judged.verdict is verdict
    assert exit_status.of_check([judged]).ending is ending
    assert words in judged.sentence
    assert (judged.word == "right where tried") is (verdict is CheckVerdict.right and ending is Ending.inconclusive)


def test_what_is_not_installed_leaves_the_verdict_on_the_others() -> None:
    missing, right = judgement(UNSUPPORTED), judgement(*[OK] * 12)
    assert exit_status.of_check([missing, right]).ending is Ending.passed
    assert exit_status.of_check([]).ending is Ending.inconclusive


def test_what_no_cell_has_shown_is_named() -> None:
    statuses = [Status.unsupported if w.num_kv_heads < 4 or w.mask == "alibi" else Status.ok for w in PLANNED]
    judged = judgement(*statuses)
    assert judged.never_tried == ("scores with a bias", "grouped heads")
    assert judged.is_enough
    assert "grouped heads" in judged.sentence
    note = RuleResult(rule="backward", holds=False, is_noted=True)
    noted = msgspec.structs.replace(agreement(), rules=(note,))
    records = tuple(msgspec.structs.replace(each, agreement=noted) for each in judgement(*[Status.ok] * 12).records)
    assert Judgement(implementation="mine", records=records, planned=PLANNED).never_tried == ("gradients",)


def test_what_a_reader_expects_of_many_cells_is_named_even_if_an_adapter_excludes_it() -> None:
    planned = tuple(Workload(seq_len=8 + number, num_heads=2, head_dim=8) for number in range(MANY_CELLS))
    planned = tuple(each.with_axes({"direction": "inference", "mask": "causal"}) for each in planned)
    assert judgement(*[OK] * MANY_CELLS, planned=planned).never_tried == ("gradients", "decode", "T != S")
    assert judgement(*[OK] * 12, planned=planned[:12]).never_tried == ()


PAIRS = (
    Workload(seq_len=8, num_heads=4, num_kv_heads=2, head_dim=8),
    Workload(seq_len=8, num_heads=4, head_dim=8, sinks="learned"),
    Workload(seq_len=8, num_heads=4, num_kv_heads=2, head_dim=8, sinks="learned"),
)


def test_features_are_counted_in_pairs() -> None:
    tried = judgement(*[OK] * 2, planned=PAIRS)
    assert tried.never_tried == ("1 of 3 pairs of these features (sinks with grouped heads)",)
    assert judgement(*[OK] * 3, planned=PAIRS).never_tried == ()
    assert judgement(OK, planned=PAIRS).never_tried == ("sinks",)


def test_kinds_of_masks_are_named_unless_no_mask_was_tried() -> None:
    planned = tuple(Workload(seq_len=8, num_heads=2, head_dim=8, mask=m) for m in ("none", "causal", "prefix(3)"))
    assert judgement(OK, planned=planned).never_tried == ("masks",)
    assert judgement(OK, OK, planned=planned).never_tried == ("prefix masks",)
    more = (*planned, Workload(seq_len=8, num_heads=2, head_dim=8, mask="chunks(3)"))
    assert judgement(OK, OK, planned=more).never_tried == ("masks other than causal",)
    assert judgement(OK, OK, OK, planned=more).never_tried == ("chunked masks",)


def test_modules_that_were_never_in_training_mode_are_named() -> None:
    planned = (Workload(seq_len=8, num_heads=2, head_dim=8, scope="module"),)
    assert judgement(OK, planned=planned).never_tried == ("training mode",)
    trained = msgspec.structs.replace(agreement(), rules=(RuleResult(rule="training mode", holds=True),))
    records = tuple(msgspec.structs.replace(each, agreement=trained) for each in judgement(OK, planned=planned).records)
    assert Judgement(implementation="mine", records=records, planned=planned).never_tried == ()


def test_twelve_cells_are_enough_however_many_are_planned() -> None:
    planned = tuple(Workload(seq_len=length, num_heads=2, head_dim=8) for length in range(8, 108))
    assert judgement(*[OK] * 12, planned=planned).is_enough
    assert not judgement(*[OK] * 11, planned=planned).is_enough


def test_memory_that_grows_with_each_call_is_no_pass() -> None:
    """`pass: right` stood below `keeps 640 B with each call`."""
    right = judgement(*[OK] * 12)
    kept = Measurement(metric=KEPT_MEMORY, unit="bytes", samples=(Sample(value=640.0),), warnings=("keeps 640 B",))
    records = (msgspec.structs.replace(right.records[0], measurements=(kept,)), *right.records[1:])
    end = exit_status.of_check([Judgement(implementation="mine", records=records, planned=PLANNED)])
    assert (end.ending, end.words) == (Ending.finding, "keeps memory (mine)")


def test_the_worst_head_of_an_approximation_is_named() -> None:
    far = {"error": 0.6, "allowed": 0.1, "expected": 1.0, "actual": 1.6, "largest": 1.0}
    tensors = (
        TensorError(tensor="output", worst=(0, 3, 1, 2), **far),  # type: ignore[arg-type]
        TensorError(tensor="gradient of key", worst=(0, 1, 1, 2), **far | {"error": 2.0}),  # type: ignore[arg-type]
    )
    found = Agreement(probes=(ProbeResult(probe="normal", tensors=tensors),))
    record = msgspec.structs.replace(judgement(Status.approximate).records[0], agreement=found)
    sentence = Judgement(implementation="mine", records=(record,), planned=PLANNED).sentence
    assert "off by up to 60 % of the largest value" in sentence
    assert "(worst: output of head 3, gradient of key of head 1 200 %)" in sentence


def test_conventions_and_notes_are_said_once_and_decide_nothing() -> None:
    judged = judgement(*[Status.ok] * 12, found="a NaN", conventions=("nan",))
    assert judged.conventions == (CONVENTIONS["nan"],)
    assert dict(judged.notes) == {"hidden NaN": "a NaN"}
    assert judged.verdict is CheckVerdict.right


def test_an_imprecise_verdict_names_tensor_cell_and_factor_and_passes() -> None:
    right, slight, most = (
        TensorError(tensor=name, error=error, allowed=1.0, worst=(0,), expected=1.0, actual=1.0, is_rounding=True)
        for name, error in (("output", 0.4), ("output", 1.2), ("gradient of key", 2.5))
    )
    records = [
        msgspec.structs.replace(each, agreement=Agreement(probes=(ProbeResult(probe=probe, tensors=found),)))
        for each, probe, found in zip(
            judgement(*[OK] * 12).records,
            ["normal", "needles", *["normal"] * 10],
            [(right, slight), (right, most), *[(right,)] * 10],
            strict=True,
        )
    ]
    judged = Judgement(implementation="mine", records=tuple(records), planned=PLANNED)
    assert judged.verdict is CheckVerdict.imprecise
    for part in ("imprecise on 12 of 12 cells", "2.5 times", "gradient of key", "needles", PLANNED[1].id):
        assert part in judged.sentence
    assert exit_status.of_check([judged]).ending is Ending.passed


def test_an_approximation_has_an_error_and_the_number_of_cells_that_are_not_finite() -> None:
    near, infinite = (agreement(error=error) for error in (0.1, None))
    records = [msgspec.structs.replace(judgement(Status.approximate).records[0], agreement=a) for a in (near, infinite)]
    first, both, last = (
        Judgement(implementation="mine", records=tuple(some), planned=PLANNED).sentence
        for some in (records[:1], records, records[1:])
    )
    assert "off by up to 10 % of the largest value on 1 of 12 cells (worst: output)" in first
    assert "not finite on 2 of 12 cells" in both
    assert "not finite on 1 of 12 cells" in last
