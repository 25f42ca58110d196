"""Breakdowns of scripted profiles: own time, allocations, kinds, and the reasons for a distance."""

import pytest

from attnbench.analysis.breakdown import (
    ran,
    where,
)
from attnbench.storage.operator_kinds import (
    KINDS,
    Span,
    fold,
    kind_of,
)
from attnbench.storage.records import Operator, Operators


def op(name: str, start: int, end: int, thread: int = 1) -> Span:
    return Span(name=name, thread=thread, start_ns=start, end_ns=end)


def operator(name: str, self_s: float, calls: int = 1) -> Operator:
    return Operator(name=name, kind=kind_of(name), num_calls=calls, self_s=self_s)


def test_where_the_time_of_a_call_goes_is_said_in_a_line_largest_first() -> None:
    calls = (operator("aten::bmm", 5e-3), operator("aten::mm", 1e-3), operator("aten::_softmax", 3e-3))
    calls += (operator("aten::where", 0.98e-3), operator("aten::empty", 0.02e-3))
    seen = Operators(calls=calls)
    assert where(seen) == "60 % matmul (bmm), 30 % softmax, 10 % mask (where)"


NAMES = {
    "attention": "aten::_scaled_dot_product_flash_attention_for_cpu aten::_scaled_dot_product_efficient_attention "
    "aten::_flash_attention_forward aten::_scaled_dot_product_flash_attention_for_cpu_backward "
    "flash_attn::_flash_attn_forward",
    "matmul": "aten::bmm aten::addmm aten::linear aten::dot aten::addmv_ ampere_sgemm_128x64_tn",
    "softmax": "aten::_softmax aten::_softmax_backward_data aten::logsumexp aten::_masked_softmax",
    "mask": "aten::masked_fill_ aten::where aten::triu aten::isneginf",
    "copy": "aten::copy_ aten::clone aten::cat aten::_to_copy aten::repeat_interleave",
    "allocation": "aten::empty_strided aten::zeros aten::empty aten::fill_ aten::zero_",
    "compiled": "CompiledFxGraph triton_poi_fused_add_0 graph_0_cpp_fused__softmax_1 graph_6_kernel",
    "other": "aten::scaled_dot_product_attention aten::_scaled_dot_product_attention_math aten::view aten::div "
    "aten::total somebody::kernel",
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, reported in NAMES.items() for name in reported.split()]
)
def test_names_have_their_kind(kind: str, name: str) -> None:
    assert kind_of(name) == kind
    assert set(NAMES) == set(KINDS)


def test_a_compiled_graph_has_one_name_in_every_process() -> None:
    call = "## Call CompiledFxGraph fl67zm3rgfvszvvn6ppwvyn2boux6keg2szhlyncfjzfkoba3quq ##"
    calls = fold(
        [op(call, 0, 100), op("Torch-Compiled Region: 1/0", 100, 110), op(call.replace("fl6", "aa7"), 120, 150)]
    )
    assert [(one.name, one.num_calls) for one in calls] == [("CompiledFxGraph", 2), ("Torch-Compiled Region", 1)]
    assert ran(Operators(calls=calls)) == "compiled: generated kernels"


def test_what_ran_is_the_backend_or_the_operator_with_the_most_time() -> None:
    bmm, softmax = operator("aten::bmm", 2.0), operator("aten::_softmax", 1.0)
    assert ran(Operators(calls=(bmm, softmax))) == "bmm"
    assert ran(Operators(calls=(bmm,), observed="math")) == "math"
    assert ran(Operators(calls=(bmm, operator("CompiledFxGraph", 0.1)), observed="flash")) == "compiled: flash"
