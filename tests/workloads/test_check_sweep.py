"""The cells of the default check include the sizes at which real kernels go wrong, and are chosen by pairs."""

import itertools

import pytest

from attnbench.workloads import sweep
from attnbench.workloads.covering import cover

CELLS = sweep.workloads(sweep.load("check"), {}, ("cpu",))
TRAINED = {"direction": "forward_backward"}
INFERENCE, NO_KEY = {"direction": "inference"}, "padding_to_nothing"
CAUSAL = TRAINED | {"mask": "causal"}
WIDE = TRAINED | {"head_dim": 128, "mask": "none", "dtype": "float32"}
OTHERS = ("prefix", "document", "chunks", "ragged")
KINDS = {
    "one key beyond whole tiles of 64": lambda w: w.kv_len > 64 and w.kv_len % 64 == 1,
    "late causal rows in bfloat16, with gradients": lambda w: w.seq_len > 512 and has(w, CAUSAL, dtype="bfloat16"),
    "late causal rows in float16, with gradients": lambda w: w.seq_len > 256 and has(w, CAUSAL, dtype="float16"),
    "causal heads 64 wide, with gradients": lambda w: has(w, CAUSAL, head_dim=64),
    "wide heads at whole tiles, in float32, without a mask": lambda w: w.kv_len % 128 == 0 and has(w, WIDE),
    "wide heads beyond two tiles, in float32, without a mask": lambda w: w.kv_len > 256 and has(w, WIDE),
    "a width that no vector of 8 divides": lambda w: w.head_dim % 8 != 0,
    "a width whose root is no whole number": lambda w: round(w.head_dim**0.5) ** 2 != w.head_dim,
    "values that no tile of 32 divides": lambda w: w.value_dim > 32 and w.value_dim % 32 != 0,
    "wider values": lambda w: w.value_dim > w.head_dim,
    "groups that differ from heads in a group": lambda w: (
        w.num_kv_heads not in {1, w.num_heads, w.num_heads / w.num_kv_heads}
    ),
    "more than four heads": lambda w: w.num_heads > 4,
    "more queries than keys": lambda w: w.seq_len > w.kv_len,
    "one query under padding": lambda w: w.seq_len == 1 and w.mask == "padding",
    "one query under a window": lambda w: w.seq_len == 1 and "sliding_window" in w.mask,
    "one query for many keys in float32, without a mask": lambda w: (
        w.seq_len == 1 and w.kv_len > 1024 and has(w, dtype="float32", mask="none", sinks="none")
    ),
    "one query with grouped heads, without a mask": lambda w: (
        w.seq_len == 1 and w.batch_size > 1 and has(w, mask="none", num_heads=6, num_kv_heads=2)
    ),
    "a bias under a mask at whole tiles": lambda w: (
        w.mask == "causal+alibi" and w.seq_len % 32 == w.kv_len % 32 == 0 and w.sinks == "none"
    ),
    "a window that begins at the query itself": lambda w: w.mask.startswith("window(0,"),
    "a scale of its own, with gradients": lambda w: w.scale > 0 and has(w, TRAINED),
    "inference beyond 256 keys, without a mask": lambda w: w.kv_len > 257 and has(w, INFERENCE, mask="none"),
    "causal modules in inference": lambda w: has(w, INFERENCE, scope="module", mask="causal"),
    "modules whose queries see no key, in inference": lambda w: has(w, INFERENCE, scope="module", mask=NO_KEY),
    "grouped modules without biases": lambda w: is_grouped_module(w, bias="none"),
    "grouped modules with all biases": lambda w: is_grouped_module(w, bias="all"),
    "grouped causal modules with input biases": lambda w: is_grouped_module(w, bias="qkv", mask="causal"),
    "batch rows of different lengths": lambda w: w.batch_size > 1 and "padding" in w.mask,
    "queries that see no key": lambda w: w.mask == NO_KEY and w.direction != "inference",
    "layouts that differ among operands, beyond a tile": lambda w: w.layout == "mixed" and w.kv_len > 128,
    "float64": lambda w: w.dtype == "float64",
    "more than 128 blocks of batch rows and heads": lambda w: has(w, TRAINED) and w.batch_size * w.num_heads > 128,
    "rows beyond 1024, with gradients": lambda w: w.seq_len > 1024 and has(w, TRAINED),
    "modules with rows beyond 1024": lambda w: w.seq_len > 1024 and w.scope == "module",
    **{f"the mask {name}": lambda w, name=name: w.mask.startswith(name) for name in OTHERS},
    **{f"modules with the mask {name}": lambda w, name=name: is_module(w, name) for name in OTHERS},
    "more than three batch rows of different lengths": lambda w: w.batch_size > 3 and has(w, mask="padding"),
    "sinks with a window": lambda w: w.sinks == "learned" and "sliding_window" in w.mask,
    "sinks with padding": lambda w: has(w, sinks="learned", mask="padding"),
    "sinks with a bias": lambda w: w.sinks == "learned" and "alibi" in w.mask,
    "sinks with one query": lambda w: w.sinks == "learned" and w.seq_len == 1,
    "ALiBi with padding, with gradients": lambda w: {"padding", "alibi"} <= {*w.mask.split("+")} and has(w, TRAINED),
    "softcap with grouped heads, with gradients": lambda w: (
        w.mask == "softcap(5)" and is_grouped(w) and has(w, TRAINED)
    ),
}


def has(workload, direction=None, **axes):
    return (direction or {}).items() | axes.items() <= workload.axes().items()


def is_grouped(workload):
    return workload.num_kv_heads < workload.num_heads


def is_module(workload, mask):
    return workload.scope == "module" and workload.mask.startswith(mask)


def is_grouped_module(workload, **axes):
    return has(workload, axes, scope="module") and is_grouped(workload)


@pytest.mark.parametrize("kind", KINDS)
def test_some_cell_has(kind):
    assert any(map(KINDS[kind], CELLS))
    assert len(CELLS) <= 147


AXES = {"a": [1, 2, 3], "b": [1, 2, 3, 4], "c": [1, 2], "d": [1]}


def pairs(combinations, axes):
    return {
        ((one, combination[one]), (other, combination[other]))
        for combination in combinations
        for one, other in itertools.combinations(sorted(axes), 2)
    }


def products(axes):
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@pytest.mark.parametrize("is_possible", [lambda _: True, lambda row: row.get("a") != row.get("b")], ids=["all", "some"])
def test_every_possible_pair_is_in_some_combination_and_they_are_few(is_possible):
    chosen = cover(AXES, is_possible)
    possible = [row for row in products(AXES) if is_possible(row)]
    assert all(row in possible for row in chosen)
    assert pairs(chosen, AXES) == pairs(possible, AXES)
    assert len(chosen) < len(possible)
    assert chosen == cover(AXES, is_possible)
