"""The gate on scripted journals: its findings, and the exit code for a CI job."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from attnbench import cli
from attnbench.analysis.conclusion import Ending
from attnbench.analysis.gate import certain
from attnbench.analysis.gate.decision import judge
from attnbench.analysis.gate.rulings import EXECUTED_FLOPS, Kind, Rule, Thresholds
from attnbench.analysis.gate.times import state_change
from attnbench.analysis.results import Results
from attnbench.statistics.verdict import Reason
from attnbench.storage.events import CeilingsMeasured, CellChecked, Event, RunStarted
from attnbench.storage.records import Operator, Operators, Status
from attnbench.workloads.counts import dense_flops
from tests import journals
from tests.analysis.gate import scripts
from tests.analysis.gate.scripts import FIRST, NAMES, Change, ends, findings, holds, killed, run, scales, vanishes


def attnbench(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    """Return a runner of command lines, which returns exit codes."""
    monkeypatch.setattr("sys.argv", ["attnbench", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


def weaker(agreement):
    return msgspec.structs.replace(agreement, probes=agreement.probes[:1])


def errs_by(share):
    """Make every error that share of its tolerance."""

    def change(agreement):
        probes = tuple(
            msgspec.structs.replace(
                probe, tensors=tuple(msgspec.structs.replace(t, error=t.allowed * share) for t in probe.tensors)
            )
            for probe in agreement.probes
        )
        return msgspec.structs.replace(agreement, probes=probes)

    return scripts.checks(change)


FOUND = {
    "regression": ([scales("fused", 1.3)], Kind.slower),
    "unchecked improvement": ([scales("fused", 0.5), scripts.checks(lambda _: None)], Kind.lost),
    "lost cell": ([vanishes()], Kind.lost),
    "became unsupported": ([ends(Status.unsupported)], Kind.lost),
    "new failure": ([ends(Status.crashed)], Kind.failed),
    "disagrees": ([ends(Status.disagrees)], Kind.failed),
    "another backend than asked": ([ends(Status.fallback)], Kind.failed),
    "memory grown": ([holds(2**30)], Kind.grown),
    "twice the FLOPs": ([scripts.executes(2 * dense_flops(scripts.POINTS[0]))], Kind.grown),
    "memory unread": ([scripts.unread()], Kind.lost),
    "fewer probes": ([scripts.checks(weaker)], Kind.lost),
    "unchecked": ([scripts.checks(lambda _: None)], Kind.lost),
    "errors grown": ([errs_by(0.999)], Kind.grown),
}


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("name", FOUND)
def test_what_got_worse_is_a_finding(name, factor, base: Results, tmp_path: Path, monkeypatch, capsys) -> None:
    changes, kind = FOUND[name]
    candidate = run(tmp_path / "run", *changes, scales("bmm", factor))
    decision = judge(base, candidate)
    found = findings(decision)
    assert kind in {ruling.kind for ruling in found}
    assert all(ruling.implementation == "fused" for ruling in found)
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder) == 1
    *lines, sentence = capsys.readouterr().out.splitlines()
    assert sentence.startswith("fail: ")
    assert {line.partition(" on ")[0] for line in lines} >= {"fail: fused", *["better: bmm"] * (factor < 1)}
    assert attnbench(monkeypatch, "compare", base.folder, candidate.folder) == 2


def test_runs_of_other_shapes_are_refused_in_one_line_that_names_the_axes(base, tmp_path, monkeypatch, capsys) -> None:
    points = journals.workloads(mask=("padding",), seq_len=(64, 128))
    candidate = run(tmp_path / "other", points=points)
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder, "--to", tmp_path / "gate") == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "they differ in seq_len (128 and 64, 128), mask (none, causal and padding)" in printed.err
    assert not (tmp_path / "gate").exists()


def test_the_same_again_passes(base: Results, tmp_path: Path, monkeypatch, capsys) -> None:
    candidate = run(tmp_path / "run")
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder) == 0
    assert "pass: nothing got worse; 4 of 4 times could be judged" in capsys.readouterr().out


def test_an_improvement_that_is_checked_passes_and_is_reported(base: Results, tmp_path: Path, monkeypatch) -> None:
    candidate = run(tmp_path / "run", scales("fused", 0.5))
    decision = judge(base, candidate)
    assert decision.ending is Ending.passed
    reported = [ruling for ruling in decision.rulings if ruling.kind is Kind.faster]
    assert {ruling.implementation for ruling in reported} == {"fused"}
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder) == 0


def test_a_slowdown_is_reported_with_its_size_and_what_could_have_been_seen(base: Results, tmp_path: Path) -> None:
    decision = judge(base, run(tmp_path / "run", scales("fused", 1.3, FIRST)))
    (found,) = [ruling for ruling in decision.rulings if ruling.kind is Kind.slower]
    assert (found.workload, found.implementation, found.unit) == (FIRST, "fused", "s")
    assert found.effect == pytest.approx(1.3, abs=1e-6)
    assert found.low is not None
    assert found.high is not None
    assert 1.2 < found.low < 1.3 < found.high < 1.4
    assert found.smallest is not None
    assert 0.05 < found.smallest < 0.3


def test_a_renamed_implementation_is_lost_and_new(base: Results, tmp_path: Path) -> None:
    decision = judge(base, run(tmp_path / "run", names=("sdpa", "chunked", "bmm")))
    kinds = {ruling.implementation: ruling.kind for ruling in decision.rulings if ruling.metric == "status"}
    assert (kinds["fused"], kinds["chunked"]) == (Kind.lost, Kind.new)


def test_what_was_wrong_before_is_known_and_what_is_mended_is_reported(base: Results, tmp_path: Path) -> None:
    wrong = run(tmp_path / "wrong", ends(Status.crashed))
    again = run(tmp_path / "again", ends(Status.crashed))
    other = run(tmp_path / "other", ends(Status.timeout))
    assert (judge(wrong, again).ending, judge(wrong, other).ending) == (Ending.passed, Ending.finding)
    assert Kind.changed in {each.kind for each in judge(wrong, other).rulings}
    assert judge(wrong, base).ending is Ending.passed
    assert "something got better" in judge(wrong, base).words
    assert Kind.fixed in {each.kind for each in judge(wrong, base).rulings}


def ran(results: Results, **changes) -> Results:
    """Add operators of `fused` on the first workload."""
    seen = Operators(
        calls=(
            Operator(name="aten::bmm", num_calls=changes.pop("num_calls", 2), self_s=1e-3),
            Operator(name="aten::_softmax", num_calls=1, self_s=1e-3),
        ),
        **{"observed": "flash", **changes},
    )
    records = tuple(
        msgspec.structs.replace(record, operators=seen)
        if (record.workload.id, record.implementation) == (FIRST, "fused")
        else record
        for record in results.records
    )
    return dataclasses.replace(results, records=records)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [(1000, 1000, Kind.same), (1000, 1001, Kind.grown), (1000, 500, Kind.shrunk), (1000, None, Kind.lost)],
)
def test_flops_are_exact_and_may_not_grow(tmp_path: Path, before, after, kind) -> None:
    runs = [run(tmp_path / str(number), scripts.executes(flops)) for number, flops in enumerate((before, after))]
    decision = judge(*runs)
    fused = [one for one in decision.rulings if (one.implementation, one.workload) == ("fused", FIRST)]
    kinds = [one.kind for one in fused if one.metric == EXECUTED_FLOPS]
    assert kinds == [kind]
    assert (decision.ending is Ending.finding) is (kind in {Kind.grown, Kind.lost})


@pytest.mark.parametrize(
    ("changes", "kind", "metric"),
    [
        ({"observed": "math"}, Kind.changed, "backend"),
        ({"num_calls": 3}, Kind.grown, "num_operators"),
        ({}, None, None),
        ({"num_calls": 1}, None, None),
    ],
)
def test_another_backend_or_more_operators_are_findings(base: Results, tmp_path: Path, changes, kind, metric) -> None:
    decision = judge(ran(base), ran(run(tmp_path / "run"), **changes))
    found = {(ruling.kind, ruling.metric) for ruling in findings(decision)}
    assert found == ({(kind, metric)} if kind else set())


def test_on_another_machine_only_facts_without_noise_are_compared(base: Results, tmp_path: Path, monkeypatch) -> None:
    slower = run(tmp_path / "slower", scripts.elsewhere, scales("fused", 1.6))
    decision = judge(base, slower)
    assert "the runs differ in machine or versions" in decision.words
    assert {one.kind for one in decision.rulings if one.metric == "latency"} == {Kind.undecided}
    assert attnbench(monkeypatch, "gate", base.folder, slower.folder) == 3
    larger = run(tmp_path / "larger", scripts.elsewhere, holds(2**30))
    assert {ruling.kind for ruling in findings(judge(base, larger))} == {Kind.grown}


def test_errors_are_compared_on_the_same_inputs_alone(tmp_path: Path) -> None:
    base = run(tmp_path / "base", errs_by(0.1))
    same = judge(base, run(tmp_path / "same", errs_by(0.45)))
    assert [ruling.metric for ruling in findings(same)] == ["error_ratio"]
    others = judge(base, run(tmp_path / "others", errs_by(0.45), lambda event: with_plan(event, seed=7)))
    assert "error_ratio" not in {ruling.metric for ruling in others.rulings}


def test_a_threshold_below_the_floor_is_refused_with_the_reason(base: Results, tmp_path: Path, monkeypatch) -> None:
    candidate = run(tmp_path / "run")
    file = tmp_path / "mine.toml"
    file.write_text('[[gate.rule]]\nmetric = "latency"\nallowed = 0.01\n')
    decision = judge(base, candidate, Thresholds(rule=(Rule(metric="latency", allowed=0.01),)))
    refused = [ruling for ruling in decision.rulings if ruling.reason is Reason.threshold]
    assert len(refused) == 4
    assert all("cannot be judged" in ruling.words for ruling in refused)
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder, "--thresholds", file) == 3


@pytest.mark.parametrize(("epochs", "visits"), [(3, 4), (2, 12)])
def test_fewer_than_four_processes_decide_nothing(base: Results, tmp_path: Path, monkeypatch, epochs, visits) -> None:
    short = run(tmp_path / "run", scales("fused", 1.3), num_epochs=epochs, num_visits=visits)
    decision = judge(base, short)
    assert decision.ending is Ending.inconclusive
    assert all("a gate needs at least 4" in r.words for r in decision.rulings if r.kind is Kind.undecided)
    assert all("--rounds" in r.words for r in decision.rulings if r.kind is Kind.undecided)
    assert attnbench(monkeypatch, "gate", base.folder, short.folder) == 3


def test_noise_that_hides_everything_is_no_pass(base: Results, tmp_path: Path, monkeypatch) -> None:
    candidate = run(tmp_path / "run", scripts.shaken)
    decision = judge(base, candidate)
    assert decision.ending is Ending.inconclusive
    assert "0 of 4 times could be judged" in decision.words
    options = "--rounds 8 --conditions steady --set num_threads=1"
    assert decision.words.endswith(f": run both again with {options}, or on a quieter machine")
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder) == 3


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [("cache", "warm", "cold"), ("launch", "eager", "graph"), ("source of the baseline", "11111111", "99999999")],
)
def test_runs_under_other_conditions_are_not_compared_in_time(name, usual, other, base, tmp_path) -> None:
    def changed(event):
        return with_plan(event, **({"digests": {"sdpa": other}} if " " in name else {name: other}))

    decision = judge(base, run(tmp_path / "run", changed))
    assert decision.ending is Ending.inconclusive
    assert f"the runs differ in {name} ({usual} and {other})" in decision.words
    assert {one.kind for one in decision.rulings if one.metric == "latency"} == {Kind.undecided}


def with_plan(event, **changes):
    if isinstance(event, RunStarted):
        return msgspec.structs.replace(event, plan=msgspec.structs.replace(event.plan, **changes))
    return event


@pytest.mark.parametrize("change", [scripts.disturbed, killed])
def test_a_session_that_is_not_valid_says_so(base: Results, tmp_path: Path, monkeypatch, change) -> None:
    candidate = run(tmp_path / "run", change, scales("fused", 1.3))
    decision = judge(base, candidate)
    assert decision.ending is Ending.invalid
    assert decision.invalid
    assert not [ruling for ruling in decision.rulings if ruling.kind is Kind.slower]
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder) == 4


def test_what_is_certain_counts_in_a_disturbed_session(base: Results, tmp_path: Path, monkeypatch) -> None:
    candidate = run(tmp_path / "run", scripts.disturbed, ends(Status.disagrees))
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder) == 1


def test_a_damaged_journal_is_an_invalid_session(base: Results, tmp_path: Path, monkeypatch, capsys) -> None:
    candidate = run(tmp_path / "run")
    journal = candidate.folder / scripts.JOURNAL
    journal.write_bytes(journal.read_bytes().replace(b'"visit_finished"', b'"visit_fin', 1))
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder) == 4
    assert "not an event of a journal" in capsys.readouterr().err


def test_mistakes_of_usage_are_distinguished_from_findings(base: Results, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert attnbench(monkeypatch, "gate", base.folder, "nowhere") == 2
    assert attnbench(monkeypatch, "gate", base.folder) == 2
    assert "holds no baseline" in capsys.readouterr().err
    assert attnbench(monkeypatch, "gate", "a", "b", "c") == 2


def test_the_reference_itself_is_not_judged(base: Results, tmp_path: Path) -> None:
    slow = run(tmp_path / "run", scales("sdpa", 1.3))
    rulings = judge(base, slow).rulings
    assert not [one for one in rulings if one.implementation == "sdpa" and one.metric == "latency"]


MESSAGES = {
    "another error": (
        "ImportError: no module (mine.py, line 3)",
        "IndexError: no index (mine.py, line 3)",
        Kind.changed,
    ),
    "another line": ("ValueError: no (mine.py, line 3)", "ValueError: no (mine.py, line 41)", Kind.same),
    "another address": ("TypeError: <T at 0x7f3acc10>", "TypeError: <T at 0x55d1f0>", Kind.same),
    "another folder": ("ImportError: x in /a/base/y.py", "ImportError: x in /b/candidate/y.py", Kind.same),
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


@pytest.mark.parametrize(("after", "kind"), [("late_mask", Kind.same), ("no_scale", Kind.changed)])
def test_wrong_answers_are_distinguished_by_their_mistakes(after: str, kind: Kind, tmp_path: Path) -> None:
    reported = (disagrees("late_mask", "wrong by 2.9"), disagrees(after, "wrong by 3.1"))
    both = [run(tmp_path / str(number), change) for number, change in enumerate(reported)]
    (found,) = [ruling for ruling in judge(*both).rulings if ruling.base == Status.disagrees]
    assert found.kind is kind


def test_runs_without_times_are_compared_in_what_they_have(tmp_path: Path) -> None:
    before, after = (run(tmp_path / name, scripts.untimed) for name in ("before", "after"))
    assert judge(before, after).ending is Ending.passed
    grown = run(tmp_path / "grown", scripts.untimed, holds(2**30))
    assert {ruling.kind for ruling in findings(judge(before, grown))} == {Kind.grown}


@pytest.mark.parametrize(("status", "more"), [(Status.error, {}), (Status.timeout, {"is_predicted": True})])
def test_where_no_cell_is_ok_on_both_sides_nothing_could_be_compared(tmp_path: Path, status, more) -> None:
    before, after = (run(tmp_path / name, scripts.all_end(status, **more)) for name in ("before", "after"))
    assert judge(before, after).ending is Ending.inconclusive


def test_a_prediction_is_no_loss_and_no_pass(base: Results, tmp_path: Path) -> None:
    assert judge(base, run(tmp_path / "run", ends(Status.timeout, is_predicted=True))).ending is Ending.inconclusive


def ceilings(kind: str, factor: float) -> Change:
    """Multiply the time of each load of that kind."""

    def change(event: Event) -> Event:
        if not isinstance(event, CeilingsMeasured):
            return event
        samples = tuple(
            msgspec.structs.replace(sample, value=sample.value * (factor if sample.kind == kind else 1.0))
            for sample in event.ceilings.samples
        )
        return msgspec.structs.replace(event, ceilings=msgspec.structs.replace(event.ceilings, samples=samples))

    return change


def test_a_slowdown_of_a_machine_in_the_same_state_is_a_finding(base: Results, tmp_path: Path) -> None:
    assert state_change(base, base) == ""
    slower = run(tmp_path / "run", scales("fused", 1.3), ceilings("copy", 1.05))
    assert judge(base, slower).ending is Ending.finding


@pytest.mark.parametrize("kind", ["matmul", "copy"])
def test_with_a_fallen_ceiling_no_time_is_compared(kind: str, base: Results, tmp_path: Path, monkeypatch) -> None:
    candidate = run(tmp_path / "run", scales("fused", 1.3), ceilings(kind, 1.35))
    decision = judge(base, candidate)
    assert decision.ending is Ending.inconclusive
    assert "the runs differ in the state of the machine (compared with the base, the fastest" in decision.words
    assert {one.kind for one in decision.rulings if one.metric == "latency"} == {Kind.undecided}
    assert attnbench(monkeypatch, "gate", base.folder, candidate.folder) == 3


def test_what_moves_everything_alike_changes_no_ratio(base: Results, tmp_path: Path) -> None:
    slower = [scales(name, 1.4) for name in NAMES]
    changes = [*slower, ceilings("matmul", 1.4), ceilings("copy", 1.4)]
    decision = judge(base, run(tmp_path / "worse", *changes, scales("fused", 1.3)))
    assert decision.ending is Ending.finding


@pytest.mark.parametrize(
    ("base", "candidate", "unit"), [(27_262_976.0, 27_262_980.0, "bytes"), (0.25, 0.25000001, ""), ("ok", "wrong", "")]
)
def test_two_facts_that_differ_are_shown_so_that_they_differ(base, candidate, unit):
    one, other = certain._both(base, candidate, unit)
    assert one != other
