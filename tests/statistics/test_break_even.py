"""After how many calls a longer first call has paid."""

import pytest

from attnbench.statistics.break_even import BreakEven, Payoff, break_even
from attnbench.storage.records import Verdict


def found(first_s=5.0, *, ratio=0.75, low=0.5, high=0.875, verdict=Verdict.faster) -> BreakEven:
    return break_even(first_s, 1.0, 2**-10, ratio=ratio, low=low, high=high, verdict=verdict)


def test_the_extra_seconds_are_divided_by_the_saving_of_a_call():
    assert found() == BreakEven(payoff=Payoff.after, calls=16_384, low=8192, high=32_768)
    assert found().words == "16,000 calls (8,200 to 33,000)"


def test_an_interval_that_reaches_the_baseline_has_no_upper_end():
    seen = found(high=1.0)
    assert (seen.payoff, seen.low, seen.high) == (Payoff.after, 8192, None)
    assert seen.words == "16,000 calls (8,200 or more)"


@pytest.mark.parametrize(
    ("changes", "payoff", "calls"),
    [
        ({"first_s": 1.0}, Payoff.at_once, 0),
        ({"first_s": 0.5}, Payoff.at_once, 0),
        ({"ratio": 1.25, "low": 1.2, "high": 1.3, "verdict": Verdict.slower}, Payoff.never, None),
        ({"ratio": 1.0, "low": 0.99, "high": 1.01, "verdict": Verdict.equivalent}, Payoff.never, None),
        ({"first_s": 0.5, "verdict": Verdict.slower}, Payoff.never, None),
        ({"low": 0.7, "high": 1.1, "verdict": Verdict.undecided}, Payoff.unknown, None),
        ({"low": None, "high": None}, Payoff.unknown, None),
    ],
)
def test_it_pays_at_once_never_or_nobody_knows(changes, payoff, calls):
    seen = found(**changes)
    assert (seen.payoff, seen.calls) == (payoff, calls)
    assert seen.words == payoff.replace("_", " ")


def test_one_call_more_is_enough_if_each_saves_more_than_the_first_costs():
    assert found(first_s=1.0001).calls == 1
    assert found(first_s=1.0001).words == "1 call (1 to 1)"
