"""The attention of torchtune, made of layers that are handed in. Without a mask it is causal by default."""

from torch import nn
from torchtune.modules import MultiHeadAttention

from attnbench.contract.adapters import adapt, split


def torchtune(**options):
    def make(s):
        groups = s.num_kv_heads * s.head_dim
        return MultiHeadAttention(
            embed_dim=s.embed_dim,
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            q_proj=nn.Linear(s.embed_dim, s.num_heads * s.head_dim, bias=s.qkv_bias),
            k_proj=nn.Linear(s.embed_dim, groups, bias=s.qkv_bias),
            v_proj=nn.Linear(s.embed_dim, groups, bias=s.qkv_bias),
            output_proj=nn.Linear(s.num_heads * s.head_dim, s.embed_dim, bias=s.out_bias),
            **options,
        )

    def call(module, x, context, mask):
        visible = None if mask.visible is None else mask.visible[:, 0].expand(len(x), *mask.sizes[1:])  # (B,T,S)
        return module(x, context, mask=visible)

    layout = split("q_proj", "k_proj", "v_proj", out="output_proj")
    return adapt(make, layout, call=call, axes=("kv_len", "num_kv_heads"))


torchtune_default, torchtune_not_causal = torchtune(), torchtune(is_causal=False)
