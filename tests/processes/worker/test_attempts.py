"""The staircase: failures are predicted from shorter lengths, and cells that fit are not refused."""

import pytest

from attnbench.processes.messages import FailedError
from attnbench.processes.worker.attempts import FIRST_LEN, predict_call_time, staircase
from attnbench.storage.records import Status
from attnbench.workloads.workload import Workload


def climbed(workload, cost, *, call_s=1.0):
    """Predict with a made-up cost law; return the tried lengths."""
    tried = []

    def attempt(step, *, is_first):
        tried.append(step.seq_len)
        return cost(step.seq_len)

    try:
        predict_call_time(call_s, workload, attempt)
    except FailedError as error:
        return tried, error
    return tried, None


LONG = Workload(seq_len=8192)


def test_steps_grow_fourfold_and_stay_below_the_length():
    assert [step.seq_len for step in staircase(LONG)] == [16, 64, 256, 1024, 4096]
    assert list(staircase(Workload(seq_len=FIRST_LEN))) == []


def test_one_query_with_a_long_cache_climbs_by_the_length_of_the_cache():
    decode = Workload(seq_len=1, kv_len=8192)
    assert [(step.seq_len, step.kv_len) for step in staircase(decode)] == [(1, 4**n) for n in range(2, 7)]
    with pytest.raises(FailedError, match=r"predicted 8\.19 s for one call.* it takes 256 ms at kv_len 256"):
        predict_call_time(1.0, decode, lambda step, **_: 1e-3 * step.kv_len)


def test_a_quadratic_cost_is_foreseen_within_a_few_percent():
    _, error = climbed(LONG, lambda n: 1e-6 * n * n, call_s=30.0)
    assert error is not None
    assert error.failed.status is Status.timeout
    assert "predicted 67.1 s" in str(error)  # 1e-6 * 8192^2


def test_a_climb_ends_where_even_quadratic_growth_stays_far_below_the_limit():
    def quick(n):
        return 1e-9 * n * n  # 0.07 s at 8192

    assert climbed(LONG, quick) == ([16], None)


@pytest.mark.parametrize("late", [256, 4096])
def test_one_late_call_does_not_cost_a_cell_its_place(late):
    calls = {}

    def cost(n):
        calls[n] = calls.get(n, 0) + 1
        return 1e-8 * n * n * (100.0 if n == late and calls[n] == 1 else 1.0)

    assert climbed(LONG, cost, call_s=0.9)[1] is None
    assert climbed(LONG, lambda n: 2e-8 * n * n, call_s=0.9)[1] is not None  # slow every time


def test_the_climb_stops_before_a_step_that_would_not_fit():
    tried, error = climbed(Workload(seq_len=2**17), lambda n: 1e-5 * n * n, call_s=1.0)
    assert error is not None
    assert tried == [16, 64, 256, 256, 256, 256]  # 1024 would take 10 s; the last is timed again


@pytest.mark.parametrize("length", [1, 2, 16])
def test_the_shortest_lengths_need_no_staircase(length):
    tried, error = climbed(Workload(seq_len=length), lambda _: 1e9)
    assert (tried, error) == ([], None)
