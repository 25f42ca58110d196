"""The time of a call by operator, and the backend that ran."""

from attnbench.analysis.breakdown import backend_used, operator_shares
from attnbench.storage.records import Operator, Operators


def operator(name: str, self_s: float, calls: int = 1) -> Operator:
    return Operator(name=name, num_calls=calls, self_s=self_s)


def test_where_the_time_of_a_call_goes_is_said_in_a_line_largest_first() -> None:
    calls = (
        operator("aten::bmm", 2e-3),
        operator("aten::bmm", 3e-3, calls=2),
        operator("aten::mm", 1e-3),
        operator("aten::_softmax", 3e-3),
    )
    calls += (operator("aten::where", 0.98e-3), operator("aten::empty", 0.02e-3))
    seen = Operators(calls=calls)
    assert operator_shares(seen) == (
        "50 % bmm (5.00 ms, 3 calls), 30 % softmax (3.00 ms, 1 call), 10 % mm (1.00 ms, 1 call), "
        "10 % where (980 us, 1 call)"
    )
    assert not operator_shares(Operators(calls=()))


def test_an_operator_that_carries_out_another_adds_time_and_no_calls() -> None:
    calls = operator("aten::softmax", 1e-3, calls=2), operator("aten::_softmax", 3e-3, calls=2)
    calls += operator("aten::add", 2e-3), operator("aten::add_", 2e-3)
    assert operator_shares(Operators(calls=calls)) == "50 % softmax (4.00 ms, 2 calls), 50 % add (4.00 ms, 2 calls)"


def test_what_ran_is_the_backend_or_the_operator_with_the_most_time() -> None:
    bmm, softmax = operator("aten::bmm", 2.0), operator("aten::_softmax", 1.0)
    assert backend_used(Operators(calls=(bmm, softmax))) == "bmm"
    assert backend_used(Operators(calls=(bmm,), observed="math")) == "math"
    assert backend_used(Operators(calls=(bmm, operator("CompiledFxGraph", 0.1)), observed="flash")) == "compiled: flash"
