"""Every implementation agrees with the oracle along each axis, as far as it supports it, and says why where not."""

from functools import cache

import pytest

from attnbench.checking.agreement import References, ask_oracle, check
from attnbench.checking.case import reason_against
from attnbench.contract import Implementation
from attnbench.plugins import plugs
from attnbench.workloads.workload import Workload

IMPLEMENTATIONS: dict[str, Implementation] = plugs("attnbench.implementations", "IMPLEMENTATION")
USUAL = {
    "batch_size": 2,
    "seq_len": 9,
    "num_heads": 4,
    "head_dim": 8,
    "mask": "causal",
    "direction": "forward_backward",
}
AXES: dict[str, list[object]] = {
    "dtype": ["float64", "bfloat16", "float16"],
    "dropout": [0.1, 0.6],
    "layout": ["transposed", "expanded", "broadcast", "value_in_key"],
    "float32_matmul_precision": ["high", "medium"],
    "num_threads": [1],
    "batch_size": [3],
    "kv_len": [5, 12],
    "value_dim": [4, 11],
    "num_kv_heads": [1],
    "scale": [0.2],
    "sinks": ["learned"],
    "bias": ["qkv", "out", "none"],
}
POINTS = [
    Workload(**(USUAL | {"scope": scope, axis: value}))
    for axis, values in AXES.items()
    for value in values
    for scope in ("attention", "module")
    if (axis, scope) not in {("layout", "module"), ("bias", "attention")}  # a module makes its own layout
]
PAIRS = [
    pytest.param(name, point, id=f"{name}-{point.id}")
    for point in POINTS
    for name, implementation in IMPLEMENTATIONS.items()
    if reason_against(implementation, point) is None
]


@cache
def references(point: Workload) -> References:
    return ask_oracle(point, 0)


@pytest.mark.parametrize(("name", "point"), PAIRS)
def test_it_agrees_along_the_axis(name: str, point: Workload) -> None:
    found = check(references(point), IMPLEMENTATIONS[name])
    assert found.agrees, found.diagnosis


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_each_takes_part_along_each_axis_or_says_why_not(name: str) -> None:
    for axis, values in AXES.items():
        points = [
            Workload(**(USUAL | {"scope": scope, axis: value})) for value in values for scope in ("attention", "module")
        ]
        reasons = [reason_against(IMPLEMENTATIONS[name], point) for point in points]
        assert all(reason is None or len(reason.split()) > 3 for reason in reasons), (axis, reasons)
