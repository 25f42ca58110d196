"""Attention over several ranks: right, counted exactly, and a rank that is killed or hangs fails its own call alone."""

import gc
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from attnbench.case import build, draw_normal, place, reason_against
from attnbench.checking.agreement import check
from attnbench.contract import Implementation
from attnbench.plugins import DISTRIBUTING
from attnbench.ranks.group import RankGroup, group_of
from attnbench.workloads.workload import DTYPE_BYTES, Workload
from tests.checks import bundled, references
from tests.rank_bytes import bytes_sent
from tests.ranks.shares import asked, fail, give_back, give_late, three

IMPLEMENTATIONS: dict[str, Implementation] = bundled()
RIGHT = ("ring", "zigzag_ring", "ulysses", "all_gather")
LIMIT_S = 100.0


def workload(**axes):
    sizes = {"batch_size": 2, "seq_len": 13, "num_heads": 4, "head_dim": 8, "direction": "forward_backward"}
    return Workload(**(sizes | axes))


def is_alive(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end at any moment
        return False


def are_gone(processes):
    """Whether all processes end soon."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if not any(map(is_alive, processes)):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def group():
    made = RankGroup(2, timeout_s=LIMIT_S)
    yield made
    made.stop()


def test_files_that_say_so_are_those_that_distribute():
    assert list(DISTRIBUTING) == sorted(name for name, each in IMPLEMENTATIONS.items() if each.distributes)
    assert {*RIGHT, "context_parallel"} == set(DISTRIBUTING)


SIZES = {
    "grouped": {"num_kv_heads": 2, "value_dim": 6},
    "bfloat16": {"num_heads": 8, "num_kv_heads": 4, "dtype": "bfloat16"},
    "fewer tokens than ranks": {"dtype": "float64", "seq_len": 3},
}


@pytest.mark.one_in(13)
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("world_size", [2, 1, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_several_ranks_agree_with_the_oracle(name, mask, world_size, sizes):
    point = workload(world_size=world_size, mask=mask, **SIZES[sizes])
    if reason_against(IMPLEMENTATIONS[name], point) is not None:
        assert name == "ulysses"  # its heads must divide
        return
    found = check(references(point), IMPLEMENTATIONS[name])
    assert found.agrees, found.diagnosis


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("direction", ["inference", "backward", "forward_backward"])
@pytest.mark.parametrize(("dtype", "length"), [("float32", 16), ("bfloat16", 17)])
def test_bytes_are_those_of_the_theory(name, direction, dtype, length):
    point = workload(
        world_size=2, direction=direction, dtype=dtype, seq_len=length, num_kv_heads=2, value_dim=6, mask="causal"
    )
    case = build(point, IMPLEMENTATIONS[name], place(draw_normal(point, 0), point))
    with case.grad_mode():
        call = case.call()
        group_of(2, "cpu").reports.clear()
        call()
    sent = sum(rank.bytes_sent for each in group_of(2, "cpu").reports for rank in each)
    assert sent == bytes_sent(name, point)
    assert DTYPE_BYTES[dtype] <= sent


def test_what_runs_in_one_process_says_so_and_one_rank_needs_no_group():
    reasons = {
        name: reason_against(each, workload(world_size=2))
        for name, each in IMPLEMENTATIONS.items()
        if not each.distributes
    }
    assert all("one process" in str(reason) for reason in reasons.values()), reasons
    point = workload(world_size=1)
    case, before = (
        build(point, IMPLEMENTATIONS["ring"], place(draw_normal(point, 0), point)),
        psutil.Process().children(),
    )
    case.call()()
    assert psutil.Process().children() == before


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize(
    "axes",
    [
        {"mask": "padding"},
        {"kv_len": 5},
        {"scope": "module"},
        {"num_threads": 2},
        {"dropout": 0.1},
        {"sinks": "learned"},
    ],
)
def test_what_ranks_cannot_do_is_refused_in_words(name, axes):
    reason = reason_against(IMPLEMENTATIONS[name], workload(world_size=2, **axes))
    assert reason is not None
    assert len(reason.split()) > 3


@pytest.mark.parametrize("name", [*RIGHT, "context_parallel"])
def test_each_rank_needs_a_gpu_of_its_own(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for number, expected in ((3, "each rank needs a device of its own: this machine has no device cuda:3"), (4, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=number: number)
        assert IMPLEMENTATIONS[name].unsupported(workload(device="cuda", world_size=4, num_heads=8)) == expected


def test_ulysses_refuses_heads_that_do_not_divide():
    assert "num_kv_heads=1" in str(IMPLEMENTATIONS["ulysses"].unsupported(workload(world_size=2, num_kv_heads=1)))
    assert "num_heads=3" in str(IMPLEMENTATIONS["ulysses"].unsupported(workload(world_size=2, num_heads=3)))


def test_an_error_of_a_rank_is_told_and_the_next_call_has_a_new_group(group):
    with pytest.raises(RuntimeError, match="rank 1 of 2: ValueError: no head for this"):
        group.forward(three(), asked(fail))
    query, key, value = three()
    _, output = group.forward((query, key, value), asked(give_back))
    assert torch.equal(output, query)


@pytest.mark.long
def test_a_graph_of_ranks_that_are_gone_is_said_to_be_and_costs_nobody_else(group):
    old, output = group.forward(three(), asked(give_back))
    sizes = [(output.dtype, tuple(output.shape))] * 3
    group.stop()
    with pytest.raises(RuntimeError, match="the ranks that held the graph of this call are gone"):
        group.backward(old, output, sizes)
    group.forward(three(), asked(give_back))
    processes = group.processes
    with pytest.raises(RuntimeError, match="the ranks that held the graph of this call are gone"):
        group.backward(old, output, sizes)
    assert group.processes == processes != []


def test_a_killed_rank_is_named_and_leaves_nothing_behind(group):
    group.forward(three(), asked(give_back))
    processes = [*group.processes, *(each.pid for each in psutil.Process(group.processes[0]).parents()[:1])]
    os.kill(group.processes[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1 of 2 is gone"):
        group.forward(three(), asked(give_back))
    assert are_gone(processes)


def test_a_rank_that_hangs_is_named_and_leaves_nothing_behind(group):
    group.forward(three(), asked(give_back))
    processes = group.processes
    os.kill(processes[1], signal.SIGSTOP)
    group.timeout_s = 1.0
    with pytest.raises(RuntimeError, match=r"ranks? .*1 of 2 ha(s|ve) not answered for"):
        group.forward(three(), asked(give_back))
    assert are_gone(processes)


OWNER = """
import sys, time, torch
from attnbench.ranks.group import RankGroup
from tests.ranks.shares import asked, give_back, sleep, three
group = RankGroup(2)
group.forward(three(), asked(give_back))
print(*group.processes, flush=True)
group.forward(three(), asked(sleep))
"""


@pytest.mark.long
def test_the_ranks_end_with_a_process_that_is_killed_in_a_call():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        processes = [int(each) for each in owner.stdout.readline().split()]
        assert len(processes) == 2
        assert all(map(psutil.pid_exists, processes))
        owner.kill()
    assert are_gone(processes)


def test_a_graph_is_forgotten_with_its_output():
    point = workload(world_size=2)
    case, group = build(point, IMPLEMENTATIONS["ring"], place(draw_normal(point, 0), point)), group_of(2, "cpu")
    output = case.output()
    torch.autograd.grad(output.sum(), list(case.tensors.values()), retain_graph=True)
    torch.autograd.grad(output.sum(), list(case.tensors.values()))
    kept = group._num_calls
    assert kept not in group._forget
    del output
    gc.collect()
    assert kept in group._forget


@pytest.mark.long
def test_a_pass_that_was_broken_off_leaves_no_answer_for_the_next_one(group, monkeypatch):
    how = asked(give_back, order="whole")
    group.forward(three(), how)

    def break_off(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(group, "_answers", break_off)
        with pytest.raises(KeyboardInterrupt):
            group.forward(three(), asked(give_late, order="whole"))
    for _ in range(2):
        given = three()
        assert torch.equal(group.forward(given, how)[1], given[0])
