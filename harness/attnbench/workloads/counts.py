"""Numbers that follow from a workload alone, in whole numbers: visible pairs, FLOPs, bytes. One pure function each.

FLOPs are those of matrix products, two for each multiply-add; biases and the softmax are small and are not counted.
Source: FlashAttention's count, of whose five products in a backward pass one makes the scores again,
https://github.com/Dao-AILab/flash-attention/blob/main/benchmarks/benchmark_flash_attention.py.
"""

import math
from functools import lru_cache

from attnbench.workloads.workload import DTYPE_BYTES, Workload


def score_matrix_bytes(workload: Workload) -> int:
    """What the textbook form needs for one score matrix: B * H * T * S numbers of the workload's dtype."""
    return workload.num_scores * DTYPE_BYTES[workload.dtype]


def every_pair(workload: Workload) -> int:
    """B * T * S: the (batch, query, key) triples of one head, visible or not."""
    return workload.batch_size * workload.seq_len * workload.kv_len


@lru_cache(maxsize=1024)  # for some masks it takes a step for each query, and reports ask many times
def visible_pairs(workload: Workload) -> int:
    """The (batch, query, key) triples of one head in which the query sees the key, summed over the batch."""
    return workload.mask_rule.num_visible(workload.batch_size, workload.seq_len, workload.kv_len)


def product_flops(workload: Workload, pairs: int, *, recomputes_scores: bool) -> int:
    """FLOPs of a call that computes so many pairs of each head, and in scope `module` projects all its tokens.

    A backward pass has four products for each pair, and with `recomputes_scores` the scores once more.
    """
    head_dim, value_dim = workload.head_dim, workload.value_dim
    forward = 2 * workload.num_heads * pairs * (head_dim + value_dim)
    backward = 2 * workload.num_heads * pairs * ((3 if recomputes_scores else 2) * head_dim + 2 * value_dim)
    projected = 2 * _projection_products(workload, *_tokens(workload))
    return _has_forward(workload) * (forward + projected) + _has_backward(workload) * (backward + 2 * projected)


def useful_flops(workload: Workload) -> int:
    """What the result asks for: visible pairs alone, in a backward pass with the scores made again, as is usual.

    Scope `attention`: forward 2 * H * nnz * (K + V), backward 2 * H * nnz * (3K + 2V), nnz summed over the batch.
    """
    return product_flops(workload, visible_pairs(workload), recomputes_scores=True)


def dense_flops(workload: Workload) -> int:
    """What the textbook form executes: every pair, hidden or not; its weights are kept for the backward pass."""
    return product_flops(workload, every_pair(workload), recomputes_scores=False)


def least_flops(workload: Workload) -> int:
    """No call that makes these products can do with fewer: nothing twice, and no token that is not needed."""
    pairs = visible_pairs(workload)
    head_dim, value_dim = workload.head_dim, workload.value_dim
    forward = 2 * workload.num_heads * pairs * (head_dim + value_dim)
    projected = 2 * _projection_products(workload, *_fewest_tokens(workload))
    return (_has_forward(workload) + 2 * _has_backward(workload)) * (forward + projected)


def compulsory_bytes(workload: Workload) -> int:
    """What has to cross between memory and processor: inputs read once, G key/value heads of them; results written.

    A backward pass reads the inputs and the output's gradient and writes the inputs' gradients. In scope `module` the
    input is x (and a context, where S differs from T) with the weights, without biases. A forward and a backward pass
    are counted one after the other.
    """
    forward, backward = (_moved(workload, *_tokens(workload), is_backward=is_backward) for is_backward in (False, True))
    numbers = _has_forward(workload) * forward + _has_backward(workload) * backward
    return numbers * DTYPE_BYTES[workload.dtype]


def least_bytes(workload: Workload) -> int:
    """No call can do with fewer: what no query sees is not read, and nothing twice in a forward and backward pass."""
    numbers = _moved(workload, *_fewest_tokens(workload), is_backward=_has_backward(workload))
    return numbers * DTYPE_BYTES[workload.dtype]


def held_bytes(workload: Workload) -> int:
    """What a call holds at once at least: inputs and output, and with a backward pass the gradients of all of them."""
    queries, keys = _tokens(workload)
    width = workload.embed_dim if workload.scope == "module" else workload.num_heads * workload.value_dim
    numbers = input_numbers(workload, queries, keys) + queries * width
    return (1 + _has_backward(workload)) * numbers * DTYPE_BYTES[workload.dtype]


def arithmetic_intensity(workload: Workload) -> float:
    """Useful FLOPs for each compulsory byte: high where the matrix units decide, low where memory does."""
    return useful_flops(workload) / compulsory_bytes(workload)


def _has_forward(workload: Workload) -> bool:
    return workload.direction != "backward"


def _has_backward(workload: Workload) -> bool:
    return workload.direction in {"backward", "forward_backward"}


def _tokens(workload: Workload) -> tuple[int, int]:
    """Query and key tokens of the whole batch."""
    return workload.batch_size * workload.seq_len, workload.batch_size * workload.kv_len


def _fewest_tokens(workload: Workload) -> tuple[int, int]:
    """As many queries and keys as there must be for the visible pairs: a query sees S keys at most, a key T queries."""
    pairs = visible_pairs(workload)
    return -(-pairs // workload.kv_len), -(-pairs // workload.seq_len)


def _projection_products(workload: Workload, queries: int, keys: int) -> int:
    """Multiply-adds of the projections of so many query and key tokens: to heads, and back to the width D."""
    if workload.scope == "attention":
        return 0
    tokens_of_heads = queries * workload.num_heads + keys * workload.num_kv_heads  # of queries, in and out
    return workload.embed_dim * (workload.head_dim + workload.value_dim) * tokens_of_heads


def _moved(workload: Workload, queries: int, keys: int, *, is_backward: bool) -> int:
    """Numbers that a pass moves which reads so many query and key tokens and writes all outputs, or all gradients."""
    all_queries, all_keys = _tokens(workload)
    width = (
        workload.embed_dim if workload.scope == "module" else workload.num_heads * workload.value_dim
    )  # of an output
    read = input_numbers(workload, queries, keys)
    if is_backward:
        return read + queries * width + input_numbers(workload, all_queries, all_keys)
    return read + all_queries * width


def input_numbers(workload: Workload, queries: int, keys: int) -> int:
    """Numbers in so many tokens of the inputs, in the weights of scope `module`, and in all other operands.

    Values that are part of the keys are not counted again.
    """
    heads, groups = workload.num_heads, workload.num_kv_heads
    widths = workload.head_dim + workload.value_dim
    others = sum(map(math.prod, workload.operands.values()))
    if workload.scope == "attention":
        of_a_key = workload.head_dim if workload.layout == "value_in_key" else widths
        return queries * heads * workload.head_dim + keys * groups * of_a_key + others
    tokens = max(queries, keys) if workload.seq_len == workload.kv_len else queries + keys  # x alone, or a context too
    return workload.embed_dim * (tokens + (heads + groups) * widths) + others
