"""The worker applies a workload's process settings, for check and timing alike, and restores them."""

import itertools

import msgspec
import pytest
import torch

from attnbench.checking import agreement, oracle
from attnbench.processes.messages import (
    ANSWERS,
    Check,
    Done,
    Failed,
    HandedIn,
    HandIn,
    Heartbeat,
    JudgeOutput,
    Observe,
    Prepare,
    Profile,
    SampleBlocks,
)
from attnbench.processes.remote import Exchange
from attnbench.processes.worker import answers
from attnbench.processes.worker.answers import Worker
from attnbench.storage.events import CellChecked, VisitFinished
from attnbench.storage.records import PROBE, Arm, Status
from attnbench.workloads.workload import MATMUL_PRECISIONS, Workload
from tests.checks import checked

SEES = """
import torch
seen = []

def f(query, key, value, *, mask=None):
    seen.append(torch.get_float32_matmul_precision())
    return (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1) @ value
"""


@pytest.mark.parametrize("precision", MATMUL_PRECISIONS)
def test_the_precision_of_float32_products_is_the_workloads_and_is_put_back(precision, tmp_path, monkeypatch):
    (tmp_path / "sees.py").write_text(SEES)
    spec = f"{tmp_path / 'sees.py'}:f"
    worker = Worker(Heartbeat())
    point = Workload(seq_len=4, num_heads=2, head_dim=4, float32_matmul_precision=precision)
    asked = []

    def noted(answer):
        def ask(*arguments):
            asked.append(torch.get_float32_matmul_precision())
            return answer(*arguments)

        return ask

    monkeypatch.setattr("attnbench.checking.oracle.answer", noted(oracle.answer))
    cell = checked(request_to_check(spec, point), worker)
    assert isinstance(cell, CellChecked)
    assert cell.status == "ok", cell.message
    assert set(asked) == {precision}  # the yardsticks' products, too
    assert torch.get_float32_matmul_precision() == "highest"
    arms = ((Arm(implementation="f"), spec),)
    visited = worker.answer(SampleBlocks(workload=point, arms=arms, epoch=0, number=0, num_blocks=1, seed=0))
    assert isinstance(visited, VisitFinished)
    function = worker.implementation(spec).build.signature.function
    assert set(function.__globals__["seen"]) == {precision}
    assert torch.get_float32_matmul_precision() == "highest"


ADDS_THE_LEAST = """
import torch

def f(query, key, value, *, mask=None):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return (scores + ~mask * torch.finfo(scores.dtype).min).softmax(-1) @ value
"""


@pytest.mark.parametrize(("dtype", "status"), [("float32", Status.ok), ("float64", Status.unsupported)])
def test_code_that_leaves_the_range_of_float32_is_not_judged_in_float64(tmp_path, dtype, status):
    (tmp_path / "adds.py").write_text(ADDS_THE_LEAST)
    point = Workload(seq_len=20, num_heads=2, head_dim=8, mask="causal", dtype=dtype)
    assert checked(request_to_check(f"{tmp_path / 'adds.py'}:f", point)).status is status


SHIFTS_BY_THE_MEAN = """
def f(query, key, value, *, bias=None):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    scores = scores - scores.mean(-1, keepdim=True)
    return scores.softmax(-1) @ value
"""


@pytest.mark.parametrize(("mask", "status"), [("alibi", Status.ok), ("boolean(40)", Status.unsupported)])
def test_a_bias_need_not_hold_minus_infinity(tmp_path, mask, status):
    (tmp_path / "shifts.py").write_text(SHIFTS_BY_THE_MEAN)
    point = Workload(seq_len=20, num_heads=2, head_dim=8, mask=mask)
    assert checked(request_to_check(f"{tmp_path / 'shifts.py'}:f", point)).status is status


def test_what_is_profiled_traced_or_counted_is_never_what_is_timed(tmp_path, monkeypatch):
    profiles = []
    begin = torch.autograd.profiler.profile._start_trace
    monkeypatch.setattr("torch.autograd.profiler.profile._start_trace", noting(begin, profiles))
    worker = Worker(Heartbeat())
    point = Workload(seq_len=8, num_heads=2, head_dim=4, direction="forward_backward")
    arms = tuple((Arm(implementation=name), name) for name in ("fused", "sdpa"))
    visit = SampleBlocks(workload=point, arms=arms, epoch=0, number=0, num_blocks=1, seed=0)
    worker.answer(visit)
    (bench,) = worker.benches.values()
    cases, calls = dict(bench.cases), {arm: timed.call for arm, timed in bench.calls.items()}
    assert profiles == []
    for request in (
        Profile(workload=point, arm=Arm(implementation="fused"), spec="fused"),
        Observe(workload=point, arm=Arm(implementation="fused"), spec="fused", metric="peak_memory"),
        Profile(workload=point, arm=Arm(implementation="fused"), spec="fused", file=str(tmp_path / "fused.json")),
    ):
        assert not isinstance(worker.answer(request), Failed)
        assert worker.observed is None or worker.observed[1] not in cases.values()
    num_profiles = len(profiles)
    assert num_profiles >= 2  # operators and memory come from one call
    taken = worker.answer(visit)
    assert isinstance(taken, VisitFinished)
    assert len(profiles) == num_profiles
    assert (bench.cases, {arm: timed.call for arm, timed in bench.calls.items()}) == (cases, calls)


def test_no_request_is_of_another_s_kind() -> None:
    kinds = [*ANSWERS]
    assert [(one, other) for one, other in itertools.permutations(kinds, 2) if issubclass(one, other)] == []


def test_a_preparation_forgets_the_tensors_of_the_check_before():
    """A judge's next file may have the path of the last one: old tensors would be read."""
    worker, arm = Worker(Heartbeat()), Arm(implementation="fused")
    before, point = worker.candidates, Workload(seq_len=4, num_heads=2, head_dim=4)
    worker.answer(Prepare(workload=point, arm=arm, spec="fused", call_limit_s=5.0, memory_limit_bytes=2**31))
    assert worker.candidates is not before


def test_what_is_unsupported_is_so_and_not_predicted():
    point = Workload(seq_len=8, num_heads=2, head_dim=4)
    asked = Prepare(
        workload=point, arm=Arm(implementation="f"), spec="torch_mha", call_limit_s=5.0, memory_limit_bytes=2**30
    )
    failed = Worker(Heartbeat()).answer(asked)
    assert (failed.status, failed.is_predicted) == ("unsupported", False)
    assert "choose scope=module" in failed.message
    long = msgspec.structs.replace(point, seq_len=2048, kv_len=2048)
    over = Worker(Heartbeat()).answer(msgspec.structs.replace(asked, workload=long, spec="fused", memory_limit_bytes=1))
    assert (over.status, over.is_predicted) == ("out_of_memory", True)


def test_a_judge_asks_the_oracle_once_for_all_implementations(monkeypatch):
    asked, ask_oracle = [], agreement.ask_oracle

    def counted(workload, *arguments, **more):
        asked.append((workload.seq_len, more["left_out"]))
        return ask_oracle(workload, *arguments, **more)

    monkeypatch.setattr(agreement, "ask_oracle", counted)
    runner = Worker(Heartbeat())
    judge = Worker(Heartbeat(), runner.answer)
    for spec, seq_len in (("fused", 4), ("sdpa", 4), ("fused", 5)):
        point = Workload(seq_len=seq_len, num_heads=2, head_dim=16, mask="causal", direction="inference")
        request = msgspec.structs.replace(request_to_check(spec, point), left_out=("huge",))
        found = checked(request, runner, judge)
        assert found.status == "ok"
        assert "huge" not in {each.probe for each in found.agreement.probes}
    assert asked == [(4, ("huge",)), (5, ("huge",))]


@pytest.mark.parametrize("num_arms", [1, 2])
def test_the_right_answers_of_a_visit_are_asked_for_in_nobodys_turn(num_arms, monkeypatch):
    heartbeat, turns = Heartbeat(), []
    worker, asked = Worker(heartbeat), answers.reference_for_probe

    def noted(*arguments):
        turns.append((heartbeat.read()[1], worker.turn))
        return asked(*arguments)

    monkeypatch.setattr(answers, "reference_for_probe", noted)
    arms = tuple((Arm(implementation=name), name) for name in ("fused", "sdpa")[:num_arms])
    point = Workload(seq_len=8, num_heads=2, head_dim=4)
    visited = worker.answer(SampleBlocks(workload=point, arms=arms, epoch=0, number=0, num_blocks=1, seed=0))
    assert isinstance(visited, VisitFinished)
    assert turns == [(Heartbeat.HARNESS, PROBE)]


def request_to_check(spec, point):
    arm = Arm(implementation="f")
    return Check(workload=point, arm=arm, spec=spec, call_limit_s=5.0, memory_limit_bytes=2**30, seed=0)


def noting(method, seen):
    def called(self):
        seen.append(self)
        return method(self)

    return called


@pytest.mark.parametrize(("dropout", "kind"), [(0.0, Failed), (0.5, Done)])
def test_a_process_that_hands_in_nothing_is_wrong_unless_its_answers_are_random(dropout, kind):
    handed = HandedIn(exchange=Exchange().path, tensors={})
    cell = {"workload": Workload(seq_len=8, dropout=dropout), "arm": Arm(implementation="theirs"), "spec": "x.py:f"}
    request = JudgeOutput(**cell, handed=handed, seed=1, numbers=(0, 2), row_seed=2)
    assert isinstance(Worker(Heartbeat()).answer(request), kind)


@pytest.mark.parametrize("results", [type("Lazy", (list,), {})(), [type("Lazy", (dict,), {})()]])
def test_results_that_compute_when_they_are_read_are_refused(results):
    worker = Worker(Heartbeat())
    worker.returned = results
    cell = {"workload": Workload(seq_len=8), "arm": Arm(implementation="theirs"), "spec": "x.py:f"}
    failed = worker.answer(HandIn(**cell, numbers=()))
    assert failed.raised == "SharedStateError"
    with pytest.raises(TypeError):
        answers.HANDLERS[HandIn] = None
