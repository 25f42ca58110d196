"""Counts compared with brute force over tiny sizes, with real tensors, and with torch's counts if it has them."""

import itertools

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from attnbench.case import build, draw_normal, output_shape, place, reason_against
from attnbench.contract.loading import implementation
from attnbench.workloads import counts
from attnbench.workloads.masks import masks
from attnbench.workloads.workload import DTYPE_BYTES, Workload
from tests.mask_texts import not_among

SIZES = [(1, 5, 5), (2, 3, 7), (3, 7, 3), (2, 1, 6)]  # B, T, S
GIVEN = ["boolean(50)"]
MASKS = [*GIVEN, *not_among(GIVEN)]
DIRECTIONS = ("inference", "forward", "backward", "forward_backward")
COUNTABLE = ("fused", "bmm", "einsum", "module_list", "sdpa_math")
MODULE = {"scope": "module", "num_heads": 2, "head_dim": 4, "embed_dim": 12}


def points(**changes) -> list[Workload]:
    """Combine every mask with every size that fits it."""
    found = []
    for (batch, queries, keys), name in itertools.product(SIZES, MASKS):
        sizes = {"batch_size": batch, "seq_len": queries, "kv_len": keys}
        try:
            found.append(Workload(**{"num_heads": 2, "head_dim": 4, **changes}, **sizes, mask=name))
        except ValueError:  # as a document mask, which needs T == S
            continue
    return found


def test_every_mask_is_counted_at_some_size():
    assert {workload.mask_rule.name for workload in points()} == set(masks())


def products(workload: Workload, *, is_backward: bool) -> int:
    """Count two for each multiply-add of each visible pair of each head, by a loop."""
    dense, total = workload.mask_rule.dense(workload.batch_size, workload.seq_len, workload.kv_len), 0
    head_dim, value_dim = workload.head_dim, workload.value_dim
    widths = [head_dim, value_dim] if not is_backward else [head_dim, value_dim, value_dim, head_dim, head_dim]
    for _, seen in itertools.product(range(workload.num_heads), dense.ravel()):
        total += sum(2 * width for width in widths) if seen else 0
    return total


@pytest.mark.parametrize("workload", points(value_dim=3), ids=lambda workload: workload.id)
def test_useful_flops_are_those_of_a_loop_over_visible_pairs(workload):
    forward, backward = products(workload, is_backward=False), products(workload, is_backward=True)
    reported = {direction: counts.useful_flops(turned(workload, direction)) for direction in DIRECTIONS}
    assert reported == {
        "inference": forward, "forward": forward, "backward": backward, "forward_backward": forward + backward,
    }  # fmt: skip


def turned(workload: Workload, direction: str) -> Workload:
    return Workload(**{**workload.axes(), "direction": direction})


def placed(workload: Workload):
    return place(draw_normal(workload, 0), workload)


@pytest.mark.parametrize("scope", ["attention", "module"])
@pytest.mark.parametrize("kv_len", [5, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compulsory_bytes_are_those_of_the_tensors_in_and_out(scope, kv_len, dtype):
    axes = {**MODULE, "scope": scope, "num_kv_heads": 1, "value_dim": 3, "dtype": dtype, "bias": "none"}
    workload = Workload(**axes, batch_size=2, seq_len=5, kv_len=kv_len, direction="forward")
    inputs = placed(workload)
    given = inputs.tensors | (inputs.weights.tensors() if scope == "module" else {})
    read = sum(tensor.numel() for tensor in given.values())
    written, size = int(np.prod(output_shape(workload))), DTYPE_BYTES[dtype]
    assert counts.compulsory_bytes(workload) == size * (read + written)
    backward = counts.compulsory_bytes(turned(workload, "backward"))
    assert backward == size * (2 * read + written)  # inputs and the output's gradient in, the inputs' gradients out
    both = counts.compulsory_bytes(turned(workload, "forward_backward"))
    assert both == counts.compulsory_bytes(workload) + backward


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("scope", ["attention", "module"])
def test_no_count_is_below_its_least_and_without_a_mask_they_meet(scope, direction):
    for workload in points(scope=scope, direction=direction):
        assert 0 <= counts.least_flops(workload) <= counts.useful_flops(workload)
        assert 0 < counts.least_bytes(workload) <= counts.compulsory_bytes(workload)
        if workload.mask == "none" and direction in {"inference", "forward"}:
            assert counts.least_flops(workload) == counts.useful_flops(workload) == counts.dense_flops(workload)
            assert counts.least_bytes(workload) == counts.compulsory_bytes(workload)


def counted(name: str, workload: Workload) -> int:
    made = build(workload, implementation(name), placed(workload))
    with made.grad_mode():
        call = made.call()
        with FlopCounterMode(display=False) as counter:
            call()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", COUNTABLE)
@pytest.mark.parametrize(
    ("scope", "direction"),  # torch's counter cannot follow autograd.grad through a module's forward
    [*itertools.product(["attention", "module"], ["inference", "backward"]), ("attention", "forward_backward")],
)
def test_executed_flops_are_what_torch_counts(name, scope, direction):
    for axes in ({"mask": "causal"}, {"mask": "none", "kv_len": 9, "num_kv_heads": 1, "value_dim": 3}):
        workload = Workload(**{**MODULE, "scope": scope, "direction": direction, **axes}, batch_size=2, seq_len=6)
        reported = implementation(name).executed_flops(workload)
        if scope == "module" and workload.num_kv_heads == 1 and name in {"module_list", "fused"}:
            assert reason_against(implementation(name), workload)  # its heads share nothing
            continue
        assert reported == counted(name, workload) == counts.dense_flops(workload)


def test_who_does_not_say_what_it_executes_is_unknown():
    workload = Workload(seq_len=8, num_heads=2, head_dim=8, mask="padding_to_nothing", batch_size=2)
    assert implementation("sdpa").executed_flops(workload) is None
    assert implementation("chunked").executed_flops(workload) is None
