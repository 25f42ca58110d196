"""PyTorch's own module, `nn.MultiheadAttention`, loaded with the canonical weights: the baseline for custom modules.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html

Shapes: B batch, T query length, S key length, H heads, K head width, D embedding width = H*K.

Peak memory of a fast-path call beyond the inputs: scores, which become weights in place, and three projections split by
heads, B H T S + 3 B T D numbers. A call that records a graph holds the projections twice and no scores.
"""

import torch
from torch import Tensor

from attnbench.contract import BoundMask, Implementation, Weights, Workload, nn, without_attend


class TorchMha(nn.Module):
    """The module with translated weights and masks; it can only be called as a whole."""

    def __init__(self, weights: Weights) -> None:
        """Take the sizes of `weights` and load them.

        Raises:
            ValueError: `weights` has no output projection, or not H*K == D.
        """
        super().__init__()
        num_heads, head_dim, embed_dim = weights.query.shape
        if weights.out is None or num_heads * head_dim != embed_dim:
            given = f"heads {num_heads} x {head_dim} over width {embed_dim}, out={weights.out is not None}"
            raise ValueError(f"nn.MultiheadAttention needs H*K == D and an output projection; given: {given}")
        self.attention = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
        if not weights.has_bias:
            self.attention.register_parameter("in_proj_bias", None)
        if weights.out_bias is None:
            del self.attention.out_proj.bias
            zeros = torch.zeros(embed_dim) if weights.has_bias else None  # the fast path needs both biases or neither
            self.attention.out_proj.register_buffer("bias", zeros, persistent=False)
        self.to(device=weights.query.device, dtype=weights.query.dtype)
        self.load_state_dict(self.pack(weights) | self.pack_out(weights))

    @property
    def dropout(self) -> float:
        """The share of the attention weights to drop; the module drops only in training mode."""
        return float(self.attention.dropout)

    @dropout.setter
    def dropout(self, share: float) -> None:
        self.attention.dropout = share
        self.attention.train(share > 0)

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """The input projection's state dict: the rows of queries, then keys, then values."""
        rows = torch.cat([weights.query, weights.key, weights.value]).flatten(0, 1)  # 3 times (H,K,D) -> (3*D,D)
        if weights.query_bias is None or weights.key_bias is None or weights.value_bias is None:
            return {"attention.in_proj_weight": rows}
        biases = torch.cat([weights.query_bias, weights.key_bias, weights.value_bias]).flatten()  # -> (3*D,)
        return {"attention.in_proj_weight": rows, "attention.in_proj_bias": biases}

    def pack_out(self, weights: Weights) -> dict[str, Tensor]:
        """The output projection's state dict."""
        named = {"attention.out_proj.weight": weights.out, "attention.out_proj.bias": weights.out_bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
        """(B, T, D) and, for cross-attention, (B, S, D) -> (B, T, D)."""
        context = x if context is None else context
        hidden, padding_mask = mask.hidden, None
        attention_mask = mask.bias(x.dtype) if mask.changes_scores else hidden  # this one also says True where hidden
        if hidden is not None and mask.is_padding:
            padding_mask, attention_mask = hidden[:, 0, 0], None  # (B,1,1,S) -> (B,S)
        elif hidden is not None and hidden is attention_mask and len(hidden) == 1:
            attention_mask = hidden[0, 0]  # (1,1,T,S) -> (T,S)
        elif attention_mask is not None:
            whole = (len(x), self.attention.num_heads, x.shape[1], context.shape[1])
            attention_mask = attention_mask.expand(whole).flatten(0, 1)  # any -> (B,H,T,S) -> (B*H,T,S)
        output: Tensor = self.attention(
            query=x,
            key=context,
            value=context,
            key_padding_mask=padding_mask,
            attn_mask=attention_mask,
            is_causal=mask.is_causal,
            need_weights=False,
        )[0]
        return output


def unsupported(workload: Workload) -> str | None:
    """Return why the module cannot run a workload, or None."""
    if workload.scope == "attention":
        return without_attend("nn.MultiheadAttention")
    if workload.num_kv_heads != workload.num_heads:
        return "nn.MultiheadAttention needs num_kv_heads == num_heads"
    if workload.num_heads * workload.head_dim != workload.embed_dim or workload.value_dim != workload.head_dim:
        return "nn.MultiheadAttention needs head_dim == value_dim == embed_dim / num_heads"
    if not workload.mask_rule.is_additive:
        return "nn.MultiheadAttention has no softcap"
    if workload.direction == "inference" and workload.biased and "out" not in workload.biased:
        return "nn.MultiheadAttention's fast path needs an output bias next to input biases"
    sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
    if workload.direction == "inference" and workload.mask_rule.has_empty_rows(*sizes):
        return "nn.MultiheadAttention's fast path gives NaN to a query that sees no key"
    return None


IMPLEMENTATION = Implementation(
    build=TorchMha,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html",
    unsupported=unsupported,
    has_dropout=True,
    features=("learned bias",),
)
