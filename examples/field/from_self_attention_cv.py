"""The attention of self-attention-cv. In its one layer the number of the head varies fastest: (K, 3, H)."""

import cpu_torchvision  # noqa: F401 - comes first
import torch
from self_attention_cv.transformer_vanilla.mhsa import MultiHeadSelfAttention

from attnbench.contract.adapters import Layout, adapt, packed


def pack(weights):
    rows = torch.stack([weights.query, weights.key, weights.value], dim=1)  # 3 times (H,K,D) -> (H,3,K,D)
    return {"to_qvk.weight": rows.permute(2, 1, 0, 3).flatten(0, 2), "W_0.weight": weights.out}  # -> (K*3*H,D)


def make(s):
    return MultiHeadSelfAttention(s.embed_dim, s.num_heads, s.head_dim)


def call(module, x, context, mask):
    return module(x, mask=None if mask.hidden is None else mask.hidden[0, 0])


MASKS = ("none", "causal", "sliding_window")
self_attention_cv = adapt(make, Layout(pack=pack), call=call, masks=MASKS, axes=("embed_dim",))
self_attention_cv_taken_for_packed = adapt(make, packed("to_qvk", out="W_0"), call=call, masks=MASKS)
