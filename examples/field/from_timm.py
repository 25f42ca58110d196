"""The attention of timm's vision transformers: with PyTorch's fused kernel, and written out."""

import cpu_torchvision  # noqa: F401 - comes first
from timm.layers import Attention

from attnbench.contract.adapters import adapt, packed


def timm(fused):
    def make(s):
        module = Attention(s.embed_dim, s.num_heads, qkv_bias=s.qkv_bias)
        module.fused_attn = fused
        return module

    return adapt(make, packed("qkv", out="proj"), call=lambda module, x, context, mask: module(x, mask.visible))


timm_fused, timm_written_out = timm(fused=True), timm(fused=False)
