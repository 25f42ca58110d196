"""`nn.MultiheadAttention` that also returns its weights, as it does by default; this disables the fused kernel.

The weights, averaged over the heads, are computed and discarded. All else is as in `torch_mha`.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html

Shapes: B batch, T query length, S key length, H heads, D embedding width = H*K.
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
        x, context, context, key_padding_mask=padding_mask, attn_mask=attention_mask, need_weights=True
    )[0]  # [1] would be the weights (B,T,S)
    return output


def set_dropout(module: nn.MultiheadAttention, share: float) -> None:
    """Set the dropout probability, and training mode if it is above 0: evaluation mode drops nothing."""
    module.dropout = share
    module.train(share > 0)


def unsupported(workload: Workload) -> str | None:
    """Return why the module cannot run a workload, such as queries that see no key; None if it can."""
    if not workload.mask_rule.is_additive:
        return "nn.MultiheadAttention has no softcap"
    if workload.direction == "inference" and workload.biased and "out" not in workload.biased:
        return "nn.MultiheadAttention's fast path needs an output bias next to input biases"
    if workload.mask_rule.has_empty_rows(workload.batch_size, workload.seq_len, workload.kv_len):
        return "nn.MultiheadAttention with weights gives NaN to a query that sees no key"
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
