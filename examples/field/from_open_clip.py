"""The attention of OpenCLIP. True in its mask says hidden, unlike in scaled_dot_product_attention."""

import cpu_torchvision  # noqa: F401 - comes first
from open_clip.transformer import Attention

from attnbench.contract.adapters import adapt, packed


def make(s):
    return Attention(s.embed_dim, s.num_heads, qkv_bias=s.qkv_bias)


open_clip = adapt(
    make, packed("in_proj_{}", out="out_proj"), call=lambda module, x, context, mask: module(x, attn_mask=mask.hidden)
)
