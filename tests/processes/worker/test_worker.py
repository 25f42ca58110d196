"""The worker applies a workload's process settings, for check and timing alike, and restores them."""

import msgspec
import pytest
import torch

from attnbench.checking import oracle
from attnbench.processes.messages import Failed, HandedIn, Heartbeat, SampleBlocks
from attnbench.processes.remote import TensorFile
from attnbench.processes.worker import answers
from attnbench.processes.worker.answers import Worker
from attnbench.storage.events import CellChecked, VisitFinished
from attnbench.storage.records import PROBE, Arm, Status
from attnbench.workloads.workload import MATMUL_PRECISIONS, Workload
from tests.checks import LIMIT_S, cell_of, checked, judge_of

SMALL = Workload(seq_len=8, num_heads=2, head_dim=4)
SEES = """
import torch
seen = []

def f(query, key, value, *, mask=None):
    seen.append(torch.get_float32_matmul_precision())
    return (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1) @ value
"""


def visit(workload, *specs):
    arms = tuple((Arm(implementation=spec.rpartition(":")[2]), spec) for spec in specs)
    return SampleBlocks(workload=workload, arms=arms, epoch=0, number=0, num_blocks=1, seed=0)


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
    found = checked(cell_of(spec, point), worker)
    assert isinstance(found, CellChecked)
    assert found.status == "ok", found.message
    assert set(asked) == {precision}  # the yardsticks' products, too
    assert torch.get_float32_matmul_precision() == "highest"
    assert isinstance(worker.answer("sample_blocks", visit=visit(point, spec)), VisitFinished)
    function = worker.implementation(spec).build.signature.function
    assert set(function.__globals__["seen"]) == {precision}
    assert torch.get_float32_matmul_precision() == "highest"


ADDS_THE_LEAST = """
import torch

def f(query, key, value, *, mask=None):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return (scores + ~mask * torch.finfo(scores.dtype).min).softmax(-1) @ value
"""
SHIFTS_BY_THE_MEAN = """
def f(query, key, value, *, bias=None):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    scores = scores - scores.mean(-1, keepdim=True)
    return scores.softmax(-1) @ value
"""


@pytest.mark.parametrize(
    ("source", "axes", "status"),
    [
        (ADDS_THE_LEAST, {"mask": "causal"}, Status.ok),
        (ADDS_THE_LEAST, {"mask": "causal", "dtype": "float64"}, Status.unsupported),
        (SHIFTS_BY_THE_MEAN, {"mask": "alibi"}, Status.ok),
        (SHIFTS_BY_THE_MEAN, {"mask": "boolean(40)"}, Status.unsupported),
    ],
    ids=["float32", "beyond the range of float32", "finite bias", "bias of minus infinity"],
)
def test_numbers_that_code_need_not_take_are_unsupported(tmp_path, source, axes, status):
    (tmp_path / "mine.py").write_text(source)
    point = Workload(seq_len=20, num_heads=2, head_dim=8, **axes)
    assert checked(cell_of(f"{tmp_path / 'mine.py'}:f", point)).status is status


def test_what_is_profiled_traced_or_counted_is_never_what_is_timed(tmp_path, monkeypatch):
    profiles = []
    begin = torch.autograd.profiler.profile._start_trace

    def noting(self):
        profiles.append(self)
        return begin(self)

    monkeypatch.setattr("torch.autograd.profiler.profile._start_trace", noting)
    worker = Worker(Heartbeat())
    point = msgspec.structs.replace(SMALL, direction="forward_backward")
    worker.answer("sample_blocks", visit=visit(point, "fused", "sdpa"))
    bench = worker.kept
    cases, calls = dict(bench.cases), {arm: timed.call for arm, timed in bench.calls.items()}
    assert profiles == []
    more = {"profile": {}, "observe": {"metric": "peak_memory"}, "trace": {"file": str(tmp_path / "fused.json")}}
    for function, arguments in more.items():
        assert not isinstance(worker.answer(function, cell=cell_of("fused", point), **arguments), Failed)
        assert worker.observed is None or worker.observed[1] not in cases.values()
    num_profiles = len(profiles)
    assert num_profiles >= 2  # operators and memory come from one call
    assert isinstance(worker.answer("sample_blocks", visit=visit(point, "fused", "sdpa")), VisitFinished)
    assert len(profiles) == num_profiles
    assert (bench.cases, {arm: timed.call for arm, timed in bench.calls.items()}) == (cases, calls)


def test_a_preparation_forgets_the_tensors_of_the_check_before():
    """A judge's next file may have the path of the last one: old tensors would be read."""
    worker = Worker(Heartbeat())
    before = worker.candidates
    worker.answer("prepare", cell=cell_of("fused", SMALL), limit_s=LIMIT_S)
    assert worker.candidates is not before


def test_what_is_unsupported_is_so_and_not_predicted():
    failed = Worker(Heartbeat()).answer("prepare", cell=cell_of("torch_mha", SMALL), limit_s=LIMIT_S)
    assert (failed.status, failed.is_predicted) == ("unsupported", False)
    assert "choose scope=module" in failed.message
    cell = cell_of("fused", msgspec.structs.replace(SMALL, seq_len=2048, kv_len=2048))
    over = Worker(Heartbeat()).answer("prepare", cell=cell, limit_s=1e-9)
    assert (over.status, over.is_predicted) == ("timeout", True)


def test_a_judge_asks_the_oracle_once_for_all_implementations(monkeypatch):
    asked, made = [], answers.References

    def counted(workload, *arguments, **more):
        asked.append(workload.seq_len)
        return made(workload, *arguments, **more)

    monkeypatch.setattr(answers, "References", counted)
    judge = judge_of(Worker(Heartbeat()))
    for spec, seq_len in (("fused", 4), ("sdpa", 4), ("fused", 5)):
        point = Workload(seq_len=seq_len, num_heads=2, head_dim=16, mask="causal", direction="inference")
        found = checked(cell_of(spec, point), judge=judge)
        assert found.status == "ok"
    assert asked == [4, 5]


def test_the_right_answers_of_a_visit_are_asked_for_in_nobodys_turn(monkeypatch):
    heartbeat, turns = Heartbeat(), []
    worker, asked = Worker(heartbeat), answers.reference_for_probe

    def noted(*arguments):
        turns.append((heartbeat.read()[1], worker.turn))
        return asked(*arguments)

    monkeypatch.setattr(answers, "reference_for_probe", noted)
    assert isinstance(worker.answer("sample_blocks", visit=visit(SMALL, "fused", "sdpa")), VisitFinished)
    assert turns == [(Heartbeat.HARNESS, PROBE)]


@pytest.mark.parametrize(("dropout", "is_wrong"), [(0.0, True), (0.5, False)])
def test_a_process_that_hands_in_nothing_is_wrong_unless_its_answers_are_random(dropout, is_wrong):
    handed = HandedIn(exchange=TensorFile().path, tensors={})
    cell = cell_of("x.py:f", Workload(seq_len=8, dropout=dropout))
    reply = Worker(Heartbeat()).answer("judge_output", cell=cell, handed=handed, seed=1, numbers=(0, 2), row_seed=2)
    assert isinstance(reply, Failed) is is_wrong


@pytest.mark.parametrize("results", [type("Lazy", (list,), {})(), [type("Lazy", (torch.Tensor,), {})()]])
def test_results_that_compute_when_they_are_read_are_refused(results):
    worker = Worker(Heartbeat())
    worker.returned, worker.refereed = results, [(None, lambda made: {"output": made + 0})]
    failed = worker.answer("hand_in", cell=cell_of("x.py:f", SMALL), numbers=(0,))
    assert failed.raised in {"SharedStateError", "FormError"}
