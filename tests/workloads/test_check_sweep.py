"""The cells of the default check meet the sizes at which real kernels go wrong."""

import pytest

from attnbench.workloads import sweep

CELLS = sweep.workloads(sweep.load("check"), {}, ("cpu",))
KINDS = {
    "one key beyond whole tiles of 64": lambda w: w.kv_len > 64 and w.kv_len % 64 == 1,
    "more than two tiles of 128": lambda w: w.kv_len > 256,
    "more than 256 queries in bfloat16, causal, with gradients": lambda w: (
        w.seq_len > 256 and w.dtype == "bfloat16" and w.mask == "causal" and w.direction != "inference"
    ),
    "heads 64 wide": lambda w: w.head_dim == 64,
    "heads 128 wide": lambda w: w.head_dim == 128,
    "a width that no vector of 8 divides": lambda w: w.head_dim % 8 != 0,
    "a width whose root is no whole number": lambda w: round(w.head_dim**0.5) ** 2 != w.head_dim,
    "values that no tile of 32 divides": lambda w: w.value_dim > 32 and w.value_dim % 32 != 0,
    "groups that differ from heads in a group": lambda w: (
        w.num_kv_heads not in {1, w.num_heads, w.num_heads / w.num_kv_heads}
    ),
    "more than four heads": lambda w: w.num_heads > 4,
    "one query under padding": lambda w: w.seq_len == 1 and w.mask == "padding",
    "one query under a window": lambda w: w.seq_len == 1 and "sliding_window" in w.mask,
    "a scale of its own, with gradients": lambda w: w.scale > 0 and w.direction == "forward_backward",
    "inference beyond 256 keys, without a mask": lambda w: (
        w.direction == "inference" and w.kv_len > 257 and w.mask == "none"
    ),
    "modules in inference": lambda w: w.scope == "module" and w.direction == "inference",
    "grouped modules without biases": lambda w: (
        w.scope == "module" and w.bias == "none" and w.num_kv_heads < w.num_heads
    ),
    "batch rows of different lengths": lambda w: w.batch_size > 1 and "padding" in w.mask,
    "queries that see no key": lambda w: w.mask == "padding_to_nothing" and w.direction != "inference",
    "layouts that differ among operands": lambda w: w.layout == "mixed" and w.kv_len > 128,
}


@pytest.mark.parametrize("kind", KINDS)
def test_some_cell_has(kind):
    assert any(map(KINDS[kind], CELLS))
