"""FlashAttention-2 in Triton, written for this project: forward and backward, causal or not, grouped heads.

A program holds a tile of queries and loops over the keys, so no score is stored. For each row it keeps the largest
score, the sum of the exponentials and the output, and rescales both sums when it finds a larger score. The backward
pass recomputes the scores from each row's logsumexp. It has two kernels: one for a tile of keys, over all queries and
query heads that read it, and one for a tile of queries. All sums are in float32.

Without a GPU it can be checked but not timed: attnbench check triton_flash --interpret.

Source: T. Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691, algorithms 1 and 2; written in Triton,
https://triton-lang.org/main/python-api/triton.language.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width (V is K).
"""

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnbench.contract import (
    Attention,
    BoundMask,
    Implementation,
    Weights,
    Workload,
    is_on,
    missing_package,
)

LARGEST_HEAD_DIM = 256
TILE, TILE_OF_WIDE, WIDE = 64, 32, 128
"""Rows of a tile, rows of a tile of heads wider than WIDE (all tiles must fit together), and that width."""
SMALLEST_WIDTH = 16
"""The smallest width that `tl.dot` accepts."""


class TritonFlash(Attention):
    """One call of the forward kernel; two kernels for the gradients."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.function: Any = made().function

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K)."""
        from_end = mask.rule.name == "causal_bottom_right"
        shift = mask.sizes[2] - mask.sizes[1] if from_end else 0  # query i sees keys up to i + shift
        attended: Tensor = self.function.apply(
            query, key, value, mask.scale_for(query.shape[-1]), not mask.is_none, shift
        )
        return attended


@cache
def made() -> SimpleNamespace:
    """The kernels and the autograd function that calls them. Triton is imported here and reads its settings now."""
    import triton
    import triton.language as tl

    @triton.jit
    def flash_fwd_tile(
        query, key, value, output, logsumexp,
        q_b, q_h, q_t, q_k, k_b, k_h, k_t, k_k, v_b, v_h, v_t, v_k, o_b, o_h, o_t, o_k,
        scale, num_heads, group, query_len, key_len, shift,
        is_causal: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr, widen: tl.constexpr,
    ):  # fmt: skip
        """One tile of queries of one head, over its visible keys."""
        operand = tl.float32 if widen else query.dtype.element_ty
        start = tl.program_id(0) * tile
        batch, head = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
        rows, columns = start + tl.arange(0, tile), tl.arange(0, padded)
        fits = (rows < query_len)[:, None] & (columns < width)[None, :]
        place = batch * q_b + head * q_h + rows[:, None] * q_t + columns[None, :] * q_k
        q = tl.load(query + place, mask=fits, other=0.0).to(operand)
        largest = tl.full([tile], float("-inf"), tl.float32)
        total = tl.zeros([tile], tl.float32)
        result = tl.zeros([tile, padded], tl.float32)
        end = key_len
        if is_causal:
            end = tl.maximum(tl.minimum(key_len, start + tile + shift), 0)
        for first in range(0, end, tile):
            others = first + tl.arange(0, tile)
            here = (others < key_len)[:, None] & (columns < width)[None, :]
            source = batch * k_b + (head // group) * k_h + others[:, None] * k_t + columns[None, :] * k_k
            k = tl.load(key + source, mask=here, other=0.0).to(operand)
            source = batch * v_b + (head // group) * v_h + others[:, None] * v_t + columns[None, :] * v_k
            v = tl.load(value + source, mask=here, other=0.0).to(operand)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = (others < key_len)[None, :]
            if is_causal:
                seen = seen & (others[None, :] <= rows[:, None] + shift)
            scores = tl.where(seen, scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            # a row without visible keys has -inf, and -inf - -inf is NaN
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp(scores - base[:, None])
            rescale = tl.exp(largest - base)
            total = total * rescale + tl.sum(weights, 1)
            result = result * rescale[:, None]
            result += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            largest = larger
        is_empty = total == 0.0
        result = result / tl.where(is_empty, 1.0, total)[:, None]
        place = batch * o_b + head * o_h + rows[:, None] * o_t + columns[None, :] * o_k
        tl.store(output + place, result.to(output.dtype.element_ty), mask=fits)
        # +inf makes every weight of such a row 0 in the backward pass
        log = tl.where(is_empty, float("inf"), largest + tl.log(tl.where(is_empty, 1.0, total)))
        tl.store(logsumexp + tl.program_id(1) * query_len + rows, log, mask=rows < query_len)

    @triton.jit
    def flash_bwd_keys(
        query, key, value, gradient, key_gradient, value_gradient, logsumexp, products,
        q_b, q_h, q_t, q_k, k_b, k_h, k_t, k_k, v_b, v_h, v_t, v_k, o_b, o_h, o_t, o_k,
        dk_b, dk_h, dk_t, dk_k, dv_b, dv_h, dv_t, dv_k,
        scale, num_heads, group, query_len, key_len, shift,
        is_causal: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr, widen: tl.constexpr,
    ):  # fmt: skip
        """The gradients of one tile of keys and values, over all queries and heads that read it."""
        operand = tl.float32 if widen else query.dtype.element_ty
        num_groups = num_heads // group
        batch, head_kv = tl.program_id(1) // num_groups, tl.program_id(1) % num_groups
        others, columns = tl.program_id(0) * tile + tl.arange(0, tile), tl.arange(0, padded)
        here = (others < key_len)[:, None] & (columns < width)[None, :]
        source = batch * k_b + head_kv * k_h + others[:, None] * k_t + columns[None, :] * k_k
        k = tl.load(key + source, mask=here, other=0.0).to(operand)
        source = batch * v_b + head_kv * v_h + others[:, None] * v_t + columns[None, :] * v_k
        v = tl.load(value + source, mask=here, other=0.0).to(operand)
        dk, dv = tl.zeros([tile, padded], tl.float32), tl.zeros([tile, padded], tl.float32)
        begin = 0
        if is_causal:  # the first query that sees the first of these keys, from the start of its tile
            begin = tl.maximum(tl.program_id(0) * tile - shift, 0) // tile * tile
        for head in range(head_kv * group, head_kv * group + group):
            for first in range(begin, query_len, tile):
                rows = first + tl.arange(0, tile)
                fits = (rows < query_len)[:, None] & (columns < width)[None, :]
                place = batch * q_b + head * q_h + rows[:, None] * q_t + columns[None, :] * q_k
                q = tl.load(query + place, mask=fits, other=0.0).to(operand)
                place = batch * o_b + head * o_h + rows[:, None] * o_t + columns[None, :] * o_k
                do = tl.load(gradient + place, mask=fits, other=0.0).to(operand)
                row = (batch * num_heads + head) * query_len + rows
                log = tl.load(logsumexp + row, mask=rows < query_len, other=float("inf"))
                product = tl.load(products + row, mask=rows < query_len, other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                seen = (others < key_len)[None, :]
                if is_causal:
                    seen = seen & (others[None, :] <= rows[:, None] + shift)
                weights = tl.where(seen, tl.exp(scores - log[:, None]), 0.0)
                dv += tl.dot(tl.trans(weights).to(do.dtype), do, input_precision="ieee")
                slope = tl.dot(do, tl.trans(v), input_precision="ieee")
                slope = weights * (slope - product[:, None]) * scale
                dk += tl.dot(tl.trans(slope).to(q.dtype), q, input_precision="ieee")
        source = batch * dk_b + head_kv * dk_h + others[:, None] * dk_t + columns[None, :] * dk_k
        tl.store(key_gradient + source, dk.to(key_gradient.dtype.element_ty), mask=here)
        source = batch * dv_b + head_kv * dv_h + others[:, None] * dv_t + columns[None, :] * dv_k
        tl.store(value_gradient + source, dv.to(value_gradient.dtype.element_ty), mask=here)

    @triton.jit
    def flash_bwd_queries(
        query, key, value, gradient, query_gradient, logsumexp, products,
        q_b, q_h, q_t, q_k, k_b, k_h, k_t, k_k, v_b, v_h, v_t, v_k, o_b, o_h, o_t, o_k, dq_b, dq_h, dq_t, dq_k,
        scale, num_heads, group, query_len, key_len, shift,
        is_causal: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr, widen: tl.constexpr,
    ):  # fmt: skip
        """The gradient of one tile of queries, over its visible keys."""
        operand = tl.float32 if widen else query.dtype.element_ty
        start = tl.program_id(0) * tile
        batch, head = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
        rows, columns = start + tl.arange(0, tile), tl.arange(0, padded)
        fits = (rows < query_len)[:, None] & (columns < width)[None, :]
        place = batch * q_b + head * q_h + rows[:, None] * q_t + columns[None, :] * q_k
        q = tl.load(query + place, mask=fits, other=0.0).to(operand)
        place = batch * o_b + head * o_h + rows[:, None] * o_t + columns[None, :] * o_k
        do = tl.load(gradient + place, mask=fits, other=0.0).to(operand)
        row = tl.program_id(1) * query_len + rows
        log = tl.load(logsumexp + row, mask=rows < query_len, other=float("inf"))
        product = tl.load(products + row, mask=rows < query_len, other=0.0)
        dq = tl.zeros([tile, padded], tl.float32)
        end = key_len
        if is_causal:
            end = tl.maximum(tl.minimum(key_len, start + tile + shift), 0)
        for first in range(0, end, tile):
            others = first + tl.arange(0, tile)
            here = (others < key_len)[:, None] & (columns < width)[None, :]
            source = batch * k_b + (head // group) * k_h + others[:, None] * k_t + columns[None, :] * k_k
            k = tl.load(key + source, mask=here, other=0.0).to(operand)
            source = batch * v_b + (head // group) * v_h + others[:, None] * v_t + columns[None, :] * v_k
            v = tl.load(value + source, mask=here, other=0.0).to(operand)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = (others < key_len)[None, :]
            if is_causal:
                seen = seen & (others[None, :] <= rows[:, None] + shift)
            weights = tl.where(seen, tl.exp(scores - log[:, None]), 0.0)
            slope = tl.dot(do, tl.trans(v), input_precision="ieee")
            slope = weights * (slope - product[:, None]) * scale
            dq += tl.dot(slope.to(k.dtype), k, input_precision="ieee")
        place = batch * dq_b + head * dq_h + rows[:, None] * dq_t + columns[None, :] * dq_k
        tl.store(query_gradient + place, dq.to(query_gradient.dtype.element_ty), mask=fits)

    class FlashFunction(torch.autograd.Function):
        """The kernels as one differentiable step."""

        @staticmethod
        def forward(
            context: Any,  # noqa: ANN401 - torch's
            query: Tensor,
            key: Tensor,
            value: Tensor,
            scale: float,
            is_causal: bool,
            shift: int,
        ) -> Tensor:
            """Query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K)."""
            output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            logsumexp = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
            options = given(query, key, is_causal=is_causal)
            flash_fwd_tile[tiles(query, options)](
                query, key, value, output, logsumexp, *strides(query, key, value, output),
                scale, *sizes(query, key), shift, **options,
            )  # fmt: skip
            context.save_for_backward(query, key, value, output, logsumexp)
            context.given = scale, is_causal, shift
            return output

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
            """Gradient (B, H, T, K) of the output -> gradients of query, key and value."""
            query, key, value, output, logsumexp = context.saved_tensors
            scale, is_causal, shift = context.given
            products = (gradient.float() * output.float()).sum(-1)  # (B,H,T), of weights and their gradients
            grads = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value)]
            options = given(query, key, is_causal=is_causal)
            flash_bwd_keys[tiles(key, options)](
                query, key, value, gradient, *grads[1:], logsumexp, products,
                *strides(query, key, value, gradient, *grads[1:]), scale, *sizes(query, key), shift, **options,
            )  # fmt: skip
            flash_bwd_queries[tiles(query, options)](
                query, key, value, gradient, grads[0], logsumexp, products,
                *strides(query, key, value, gradient, grads[0]), scale, *sizes(query, key), shift, **options,
            )  # fmt: skip
            return (*grads, None, None, None)

    kernels = {"forward": flash_fwd_tile, "backward_keys": flash_bwd_keys, "backward_queries": flash_bwd_queries}
    return SimpleNamespace(function=FlashFunction, **kernels)


def given(query: Tensor, key: Tensor, *, is_causal: bool) -> dict[str, Any]:
    """The constants for compilation: the width and the next power of 2, the tile, the mask."""
    width = query.shape[-1]
    assert key.shape[-1] == width  # see `unsupported`
    padded = max(SMALLEST_WIDTH, 1 << (width - 1).bit_length())
    return {
        "is_causal": is_causal,
        "width": width,
        "padded": padded,
        "tile": TILE if padded <= WIDE else TILE_OF_WIDE,
        "widen": is_interpreted() and query.dtype == torch.bfloat16,  # the interpreter multiplies its bits as integers
    }


def strides(*tensors: Tensor) -> list[int]:
    """The strides of batch, head, token and width for each tensor."""
    return [step for tensor in tensors for step in tensor.stride()]


def sizes(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    """H, query heads per key/value head, T, S."""
    return query.shape[1], query.shape[1] // key.shape[1], query.shape[2], key.shape[2]


def tiles(tensor: Tensor, options: dict[str, Any]) -> tuple[int, int]:
    """The grid of programs: tiles of tokens, and heads of all batch rows."""
    return -(-tensor.shape[2] // options["tile"]), tensor.shape[0] * tensor.shape[1]


def unsupported(workload: Workload) -> str | None:
    """Return why the kernels cannot run a workload, or None."""
    if reason := missing_package("triton"):
        return reason
    if not is_on("cuda", workload) and not is_interpreted():
        return "triton_flash needs CUDA, or attnbench check --interpret, which checks it without a GPU"
    if workload.dtype == "float64":
        return "triton_flash needs dtype float32, bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"triton_flash needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    if workload.dropout > 0:
        return "triton_flash has no dropout"
    name = workload.mask_rule.name
    if name not in {"none", "causal", "causal_bottom_right"}:
        return f"triton_flash takes no mask {name}, but none, causal and causal_bottom_right"
    return None


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


IMPLEMENTATION = Implementation(
    build=TritonFlash,
    source="https://arxiv.org/abs/2307.08691",
    unsupported=unsupported,
    compiles=True,
    features=("scale",),
)
