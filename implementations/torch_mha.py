"""PyTorch's own module, `nn.MultiheadAttention`, with the same weights as all others: the baseline for custom modules.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html

Shapes: B batch, T query length, S key length, H heads, K head width, D embedding width = H*K.

Peak memory of a fast-path call beyond the inputs: scores, which become weights in place, and three projections split by
heads, B H T S + 3 B T D numbers. A call that records a graph holds the projections twice and no scores.
"""

import torch
from torch import Tensor, nn

from attnbench.contract import BoundMask, Workload
from attnbench.contract.adapters import Sizes, adapt, packed


def make(sizes: Sizes) -> nn.MultiheadAttention:
    """Create the module, without the biases that the workload excludes."""
    module = nn.MultiheadAttention(sizes.embed_dim, sizes.num_heads, batch_first=True)
    if not sizes.qkv_bias:
        module.register_parameter("in_proj_bias", None)
    if not sizes.out_bias:
        del module.out_proj.bias
        zeros = torch.zeros(sizes.embed_dim) if sizes.qkv_bias else None  # the fast path needs both biases or neither
        module.out_proj.register_buffer("bias", zeros, persistent=False)
    return module


def call(module: nn.MultiheadAttention, x: Tensor, context: Tensor, mask: BoundMask) -> Tensor:
    """Call the module: tokens x (B, T, D), context (B, S, D) for keys and values -> (B, T, D)."""
    padding_mask = attention_mask = None
    if mask.rule.changes_scores:
        attention_mask = mask.added_as("nts", x.dtype)  # (B*H,T,S)
    elif mask.hidden is not None and mask.hidden.shape[2] == 1:  # all queries see the same keys
        padding_mask = mask.hidden_as("bs")  # in the module's masks, too, True hides
    elif mask.hidden is not None:
        attention_mask = mask.hidden_as("ts" if len(mask.hidden) == 1 else "nts")  # (T,S) or (B*H,T,S)
    output: Tensor = module(
        x,
        context,
        context,
        key_padding_mask=padding_mask,
        attn_mask=attention_mask,
        is_causal=mask.is_causal and attention_mask is not None,  # the module accepts the hint only with a mask
        need_weights=False,
    )[0]
    return output


def set_dropout(module: nn.MultiheadAttention, share: float) -> None:
    """Set the dropout probability, and training mode if it is above 0: evaluation mode drops nothing."""
    module.dropout = share
    module.train(share > 0)


def unsupported(workload: Workload) -> str | None:
    """Return why the module cannot run a workload; None if it can."""
    if not workload.mask_rule.is_additive:
        return "nn.MultiheadAttention has no softcap"
    if workload.direction == "inference" and workload.biased and "out" not in workload.biased:
        return "nn.MultiheadAttention's fast path needs an output bias next to input biases"
    sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
    if workload.direction == "inference" and workload.mask_rule.has_empty_rows(*sizes):
        return "nn.MultiheadAttention's fast path gives NaN to a query that sees no key"
    return None


IMPLEMENTATION = adapt(
    make,
    packed("in_proj_{}", out="out_proj"),
    call=call,
    changes_scores=True,
    unsupported=unsupported,
    dropout=set_dropout,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html",
)
