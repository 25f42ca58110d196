"""FlashAttention-2 in Triton, written for this project: forward and backward, causal or not, grouped heads.

A program holds a tile of queries and loops over the keys, so no score is stored. For each row it keeps the largest
score m_i, the sum of the exponentials l_i and the output acc, and rescales both sums when it finds a larger score. The
backward pass recomputes the scores from each row's logsumexp. It has two kernels: one for a tile of keys, over all
queries and query heads that read it, and one for a tile of queries. All sums are in float32.

Without a GPU it can be checked but not timed: attnbench check triton_flash --interpret.

Source: T. Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691, algorithms 1 and 2; written in Triton,
https://triton-lang.org/main/python-api/triton.language.html, with the names of its tutorial on fused attention.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width (V is K); M, N and D of a tile.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnbench.contract import Workload, is_on, missing_package

try:  # Triton reads its settings now
    import triton.language as tl
    from triton import jit
except ImportError:  # `unsupported` says so
    tl, jit = SimpleNamespace(constexpr=int), lambda kernel: kernel

LARGEST_HEAD_DIM = 256
LEAST, MOST_ROWS, TILE_BYTES = 16, 64, 8192
"""The fewest rows and columns that `tl.dot` accepts, the most rows of a tile, and the most bytes of a tile with more
rows than LEAST. All tiles of a kernel, some of them loaded ahead, must fit together into the shared memory of every
GPU; compute capability 8.9 has the smallest (`nox -s triton`, results/gallery/gpu/shared_memory.md)."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    num_kv_heads: int,
    is_causal: bool = False,
    is_causal_bottom_right: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K)."""
    shift = key.shape[2] - query.shape[2] if is_causal_bottom_right else 0  # query i sees keys up to i + shift
    output: Tensor = Flash.apply(query, key, value, scale, is_causal or is_causal_bottom_right, shift)  # type: ignore[no-untyped-call]
    return output


@jit
def offset(stride_b, stride_h, stride_t, stride_d, b, h, offs_t, offs_d):
    """Places of a tile (M or N, D) in 64 bits, since a tensor may have more than 2^31 numbers."""
    head = tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    return head + tl.cast(offs_t, tl.int64)[:, None] * stride_t + offs_d[None, :] * stride_d


@jit
def load(X, stride_b, stride_h, stride_t, stride_d, b, h, offs_t, offs_d, length, HEAD_DIM: tl.constexpr):
    """Rows `offs_t` of one head of X: a tile (M or N, D), with 0 outside of X."""
    inside = (offs_t < length)[:, None] & (offs_d < HEAD_DIM)[None, :]
    places = offset(stride_b, stride_h, stride_t, stride_d, b, h, offs_t, offs_d)
    return tl.load(X + places, mask=inside, other=0.0)


@jit
def store(X, tile, stride_b, stride_h, stride_t, stride_d, b, h, offs_t, offs_d, length, HEAD_DIM: tl.constexpr):
    """Write a tile (M or N, D) to rows `offs_t` of one head of X."""
    inside = (offs_t < length)[:, None] & (offs_d < HEAD_DIM)[None, :]
    places = offset(stride_b, stride_h, stride_t, stride_d, b, h, offs_t, offs_d)
    tl.store(X + places, tile.to(X.dtype.element_ty), mask=inside)


@jit
def scores(q, k, scale, offs_m, offs_n, key_len, shift, IS_CAUSAL: tl.constexpr):
    """Scores (M, N) of a tile of queries and a tile of keys, -inf where a key is hidden."""
    qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    visible = (offs_n < key_len)[None, :]
    if IS_CAUSAL:
        visible = visible & (offs_n[None, :] <= offs_m[:, None] + shift)
    return tl.where(visible, qk, float("-inf"))


@jit
def flash_fwd_tile(
    Q, K, V, O, LSE,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
    scale, num_heads, group, query_len, key_len, shift,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, over its visible keys."""
    dtype = tl.float32 if WIDEN else Q.dtype.element_ty
    start_m = tl.program_id(0) * BLOCK_M
    b, h = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    offs_m, offs_d = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q = load(Q, q_b, q_h, q_t, q_d, b, h, offs_m, offs_d, query_len, HEAD_DIM).to(dtype)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = key_len
    if IS_CAUSAL:
        end = tl.maximum(tl.minimum(key_len, start_m + BLOCK_M + shift), 0)
    for start_n in range(0, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load(K, k_b, k_h, k_t, k_d, b, h // group, offs_n, offs_d, key_len, HEAD_DIM).to(dtype)
        v = load(V, v_b, v_h, v_t, v_d, b, h // group, offs_n, offs_d, key_len, HEAD_DIM).to(dtype)
        qk = scores(q, k, scale, offs_m, offs_n, key_len, shift, IS_CAUSAL)
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        # a row without visible keys has -inf, and -inf - -inf is NaN
        base = tl.where(m_ij == float("-inf"), 0.0, m_ij)
        p = tl.exp(qk - base[:, None])
        alpha = tl.exp(m_i - base)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_ij
    is_empty = l_i == 0.0
    acc = acc / tl.where(is_empty, 1.0, l_i)[:, None]
    store(O, acc, o_b, o_h, o_t, o_d, b, h, offs_m, offs_d, query_len, HEAD_DIM)
    # +inf makes every weight of an empty row 0 in the backward pass
    lse = tl.where(is_empty, float("inf"), m_i + tl.log(tl.where(is_empty, 1.0, l_i)))
    row = tl.cast(tl.program_id(1), tl.int64) * query_len + offs_m
    tl.store(LSE + row, lse, mask=offs_m < query_len)


@jit
def flash_bwd_keys(
    Q, K, V, DO, DK, DV, LSE, DELTA,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d,
    dk_b, dk_h, dk_t, dk_d, dv_b, dv_h, dv_t, dv_d,
    scale, num_heads, group, query_len, key_len, shift,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values, over all queries and heads that read it."""
    dtype = tl.float32 if WIDEN else Q.dtype.element_ty
    start_n, num_groups = tl.program_id(0) * BLOCK_N, num_heads // group
    b, g = tl.program_id(1) // num_groups, tl.program_id(1) % num_groups
    offs_n, offs_d = start_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k = load(K, k_b, k_h, k_t, k_d, b, g, offs_n, offs_d, key_len, HEAD_DIM).to(dtype)
    v = load(V, v_b, v_h, v_t, v_d, b, g, offs_n, offs_d, key_len, HEAD_DIM).to(dtype)
    dk, dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    begin = 0
    if IS_CAUSAL:  # the first query that sees the first of these keys, from the start of its tile
        begin = tl.maximum(start_n - shift, 0) // BLOCK_M * BLOCK_M
    for h in range(g * group, g * group + group):
        for start_m in range(begin, query_len, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load(Q, q_b, q_h, q_t, q_d, b, h, offs_m, offs_d, query_len, HEAD_DIM).to(dtype)
            do = load(DO, do_b, do_h, do_t, do_d, b, h, offs_m, offs_d, query_len, HEAD_DIM).to(dtype)
            row = tl.cast(b * num_heads + h, tl.int64) * query_len + offs_m
            lse = tl.load(LSE + row, mask=offs_m < query_len, other=float("inf"))
            delta = tl.load(DELTA + row, mask=offs_m < query_len, other=0.0)
            p = tl.exp(scores(q, k, scale, offs_m, offs_n, key_len, shift, IS_CAUSAL) - lse[:, None])
            dv += tl.dot(tl.trans(p).to(do.dtype), do, input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None]) * scale
            dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
    store(DK, dk, dk_b, dk_h, dk_t, dk_d, b, g, offs_n, offs_d, key_len, HEAD_DIM)
    store(DV, dv, dv_b, dv_h, dv_t, dv_d, b, g, offs_n, offs_d, key_len, HEAD_DIM)


@jit
def flash_bwd_queries(
    Q, K, V, DO, DQ, LSE, DELTA,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d, dq_b, dq_h, dq_t, dq_d,
    scale, num_heads, group, query_len, key_len, shift,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries, over its visible keys."""
    dtype = tl.float32 if WIDEN else Q.dtype.element_ty
    start_m = tl.program_id(0) * BLOCK_M
    b, h = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    offs_m, offs_d = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q = load(Q, q_b, q_h, q_t, q_d, b, h, offs_m, offs_d, query_len, HEAD_DIM).to(dtype)
    do = load(DO, do_b, do_h, do_t, do_d, b, h, offs_m, offs_d, query_len, HEAD_DIM).to(dtype)
    row = tl.cast(tl.program_id(1), tl.int64) * query_len + offs_m
    lse = tl.load(LSE + row, mask=offs_m < query_len, other=float("inf"))
    delta = tl.load(DELTA + row, mask=offs_m < query_len, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = key_len
    if IS_CAUSAL:
        end = tl.maximum(tl.minimum(key_len, start_m + BLOCK_M + shift), 0)
    for start_n in range(0, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load(K, k_b, k_h, k_t, k_d, b, h // group, offs_n, offs_d, key_len, HEAD_DIM).to(dtype)
        v = load(V, v_b, v_h, v_t, v_d, b, h // group, offs_n, offs_d, key_len, HEAD_DIM).to(dtype)
        p = tl.exp(scores(q, k, scale, offs_m, offs_n, key_len, shift, IS_CAUSAL) - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * scale
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    store(DQ, dq, dq_b, dq_h, dq_t, dq_d, b, h, offs_m, offs_d, query_len, HEAD_DIM)


class Flash(torch.autograd.Function):
    """The kernels as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        is_causal: bool,
        shift: int,
    ) -> Tensor:
        """Compute attention: query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K)."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        flash_fwd_tile[grid(query)](
            query, key, value, output, lse, *strides(query, key, value, output),
            scale, *sizes(query, key), shift, **constants(query, is_causal=is_causal),
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.scale, ctx.is_causal, ctx.shift = scale, is_causal, shift
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Compute the gradients of query, key and value from the output's gradient (B, H, T, K)."""
        query, key, value, output, lse = ctx.saved_tensors
        delta = (grad.float() * output.float()).sum(-1)  # (B,H,T), of weights and their gradients
        dq, dk, dv = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value))
        how = constants(query, is_causal=ctx.is_causal)
        flash_bwd_keys[grid(key)](
            query, key, value, grad, dk, dv, lse, delta, *strides(query, key, value, grad, dk, dv),
            ctx.scale, *sizes(query, key), ctx.shift, **how,
        )  # fmt: skip
        flash_bwd_queries[grid(query)](
            query, key, value, grad, dq, lse, delta, *strides(query, key, value, grad, dq),
            ctx.scale, *sizes(query, key), ctx.shift, **how,
        )  # fmt: skip
        return dq, dk, dv, None, None, None


def constants(query: Tensor, *, is_causal: bool) -> dict[str, Any]:
    """Return the compile-time constants: mask, head width, sizes of tiles, and whether to convert inputs to float32."""
    rows, width = block(query), query.shape[-1]
    return {
        "IS_CAUSAL": is_causal,
        "HEAD_DIM": width,
        "BLOCK_D": padded(width),
        "BLOCK_M": rows,
        "BLOCK_N": rows,
        "WIDEN": is_interpreted() and query.dtype == torch.bfloat16,  # the interpreter multiplies its bits as integers
    }


def padded(width: int) -> int:
    """Return the width of a tile: the next power of 2, but at least LEAST."""
    return max(LEAST, 1 << (width - 1).bit_length())


def block(tensor: Tensor) -> int:
    """Return the number of rows of a tile, of queries or of keys."""
    return max(LEAST, min(MOST_ROWS, TILE_BYTES // (padded(tensor.shape[-1]) * tensor.element_size())))


def strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, head, token and width of each tensor, all in one list."""
    return [step for tensor in tensors for step in tensor.stride()]


def sizes(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    """Return H, H / G (query heads per key/value head), T and S."""
    return query.shape[1], query.shape[1] // key.shape[1], query.shape[2], key.shape[2]


def grid(tensor: Tensor) -> tuple[int, int]:
    """Return the grid of programs: the number of tiles of tokens, and of heads in all batch rows."""
    return -(-tensor.shape[2] // block(tensor)), tensor.shape[0] * tensor.shape[1]


def unsupported(workload: Workload) -> str | None:
    """Return why the kernels cannot run a workload; None if they can."""
    if reason := missing_package("triton"):
        return reason
    if not is_on("cuda", workload) and not is_interpreted():
        return "triton_flash needs CUDA, or attnbench check --interpret, which checks it without a GPU"
    if workload.dtype == "float64":
        return "triton_flash needs dtype float32, bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"triton_flash needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    return None


def is_interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
