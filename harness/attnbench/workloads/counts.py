"""Exact counts, such as visible pairs, FLOPs and bytes, as pure functions of a workload.

Only matrix products count, with two FLOPs for each multiply-add; biases and the softmax are small and not counted.
Source: FlashAttention's count, in which one of the five products of a backward pass recomputes the scores,
https://github.com/Dao-AILab/flash-attention/blob/main/benchmarks/benchmark_flash_attention.py.
"""

import math
from functools import lru_cache

import msgspec

from attnbench.workloads.batch import SAME
from attnbench.workloads.workload import DTYPE_BYTES, Workload


def score_matrix_bytes(workload: Workload) -> int:
    """Return the bytes of all scores in the textbook form: B * H * T * S numbers of the workload's dtype."""
    return workload.num_scores * DTYPE_BYTES[workload.dtype]


@lru_cache(maxsize=1024)  # slow for masks without a span, and reports call it often
def visible_pairs(workload: Workload) -> int:
    """Return the number of (query, key) pairs of one head in which the query sees the key, summed over the batch."""
    return workload.mask_rule.num_visible(workload.batch_size, workload.seq_len, workload.kv_len)


def product_flops(workload: Workload, pairs: int, tokens: tuple[int, int], *, recomputes_scores: bool) -> int:
    """Return the FLOPs of a call that computes `pairs` (query, key) pairs in each head.

    Scope `module` adds projections; `tokens` are the numbers of query and key tokens that are projected. A backward
    pass has four products for each pair, and a fifth with `recomputes_scores`.
    """
    head_dim, value_dim = workload.head_dim, workload.value_dim
    forward = 2 * workload.num_heads * pairs * (head_dim + value_dim)
    backward = 2 * workload.num_heads * pairs * ((3 if recomputes_scores else 2) * head_dim + 2 * value_dim)
    projected = 2 * _projection_products(workload, *tokens)
    return _has_forward(workload) * (forward + projected) + _has_backward(workload) * (backward + 2 * projected)


def useful_flops(workload: Workload) -> int:
    """Return the FLOPs of a call that skips hidden pairs; a backward pass recomputes the scores, as is usual.

    Scope `attention`: forward 2 * H * n * (K + V), backward 2 * H * n * (3K + 2V), with n = `visible_pairs`.
    """
    return product_flops(workload, visible_pairs(workload), _tokens(workload), recomputes_scores=True)


def dense_flops(workload: Workload) -> int:
    """Return the FLOPs of the textbook form: it also computes hidden pairs, and keeps the weights for a backward pass.

    In a batch of requests, only the pairs within each request count.
    """
    pairs = workload.batch_size * workload.seq_len * workload.kv_len
    if workload.requests:
        pairs = sum(each.new * each.total for each in workload.requests)
    return product_flops(workload, pairs, _tokens(workload), recomputes_scores=False)


def least_flops(workload: Workload) -> int:
    """Return a lower bound on the FLOPs of a call: no recomputation, projections of tokens in visible pairs only."""
    return product_flops(workload, visible_pairs(workload), _fewest_tokens(workload), recomputes_scores=False)


def compulsory_bytes(workload: Workload) -> int:
    """Return the bytes that must move between memory and processor: inputs are read once, and results are written.

    The inputs have G key/value heads. A backward pass reads the inputs and the output's gradient and writes the inputs'
    gradients. In scope `module` the inputs are x (and a context, if S differs from T) and the weights, without biases.
    A forward and a backward pass are counted separately and added. For keys and values of a cache, see `cache_bytes`.
    """
    forward, backward = (_moved(workload, *_tokens(workload), is_backward=is_backward) for is_backward in (False, True))
    numbers = _has_forward(workload) * forward + _has_backward(workload) * backward
    return numbers * DTYPE_BYTES[workload.dtype] - _spared_bytes(workload)


def least_bytes(workload: Workload) -> int:
    """Return a lower bound on the bytes of a call: only tokens in visible pairs are read, and nothing is read twice."""
    if workload.requests:
        return compulsory_bytes(workload)
    numbers = _moved(workload, *_fewest_tokens(workload), is_backward=_has_backward(workload))
    return numbers * DTYPE_BYTES[workload.dtype]


def cache_bytes(workload: Workload) -> int:
    """Return the bytes of keys and values, in the cache's dtype, that a call on a batch of requests must read.

    Each key that at least one query sees is read once, even if several requests share it.
    """
    assert workload.cache is not None
    return workload.cache.num_keys * _slot_bytes(workload)


def pool_bytes(workload: Workload) -> int:
    """Return the bytes that a batch of requests occupies in the cache: those of all slots in `Cache.num_slots`."""
    assert workload.cache is not None
    return workload.cache.num_slots * _slot_bytes(workload)


def gathered_bytes(workload: Workload) -> int:
    """Return the bytes of a batch's keys and values in the call's dtype, gathered from pages for a dense function."""
    return workload.kv_len * _slot_bytes(msgspec.structs.replace(workload, cache_dtype=SAME))


def _slot_bytes(workload: Workload) -> int:
    """Return the bytes of the key and value of one token in all G heads, in the cache's dtype."""
    each_bytes = DTYPE_BYTES[workload.dtype] if workload.cache_dtype == SAME else 1
    return workload.num_kv_heads * (workload.head_dim + workload.value_dim) * each_bytes


def _spared_bytes(workload: Workload) -> int:
    """Return the bytes of all S keys and values in the workload's dtype, minus `cache_bytes`; 0 without a batch."""
    if not workload.requests:
        return 0
    each_bytes = workload.num_kv_heads * (workload.head_dim + workload.value_dim) * DTYPE_BYTES[workload.dtype]
    return workload.kv_len * each_bytes - cache_bytes(workload)


def _has_forward(workload: Workload) -> bool:
    return workload.direction != "backward"


def _has_backward(workload: Workload) -> bool:
    return workload.direction in {"backward", "forward_backward"}


def _tokens(workload: Workload) -> tuple[int, int]:
    """Return the numbers of query and key tokens in the whole batch."""
    return workload.batch_size * workload.seq_len, workload.batch_size * workload.kv_len


def _fewest_tokens(workload: Workload) -> tuple[int, int]:
    """Return lower bounds on the numbers of queries and keys in visible pairs.

    A query is in at most S pairs, and a key in at most T.
    """
    pairs = visible_pairs(workload)
    return -(-pairs // workload.kv_len), -(-pairs // workload.seq_len)


def _projection_products(workload: Workload, queries: int, keys: int) -> int:
    """Return the multiply-adds of all projections of `queries` query tokens and `keys` key tokens."""
    if workload.scope == "attention":
        return 0
    tokens_of_heads = queries * workload.num_heads + keys * workload.num_kv_heads  # (query, output), (key, value)
    return workload.embed_dim * (workload.head_dim + workload.value_dim) * tokens_of_heads


def _moved(workload: Workload, queries: int, keys: int, *, is_backward: bool) -> int:
    """Count the numbers that a pass moves: it reads `queries` query and `keys` key tokens, and writes all results.

    A forward pass writes the output. A backward pass also reads the output's gradient, and writes input gradients.
    """
    all_queries, all_keys = _tokens(workload)
    of_output = workload.embed_dim if workload.scope == "module" else workload.num_heads * workload.value_dim
    read = input_numbers(workload, queries, keys)
    if is_backward:
        return read + queries * of_output + input_numbers(workload, all_queries, all_keys)
    return read + all_queries * of_output


def input_numbers(workload: Workload, queries: int, keys: int) -> int:
    """Count the numbers in the inputs: `queries` query and `keys` key tokens, sinks, learned biases, module weights.

    Values that are part of the keys (layout value_in_key) are not counted again.
    """
    heads, groups = workload.num_heads, workload.num_kv_heads
    widths = workload.head_dim + workload.value_dim
    others = sum(map(math.prod, workload.operands.values()))
    if workload.scope == "attention":
        of_a_key = workload.head_dim if workload.layout == "value_in_key" else widths
        return queries * heads * workload.head_dim + keys * groups * of_a_key + others
    tokens = max(queries, keys) if workload.seq_len == workload.kv_len else queries + keys  # x alone, or a context too
    return workload.embed_dim * (tokens + (heads + groups) * widths) + others
