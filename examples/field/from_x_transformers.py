"""The attention of x-transformers, with and without its flash option. It returns more than the output."""

from x_transformers.x_transformers import Attention

from attnbench.contract.adapters import adapt, split


def x_transformers(flash):
    def make(s):
        return Attention(s.embed_dim, dim_head=s.head_dim, heads=s.num_heads, kv_heads=s.num_kv_heads, flash=flash)

    def call(module, x, context, mask):
        return module(x, context, attn_mask=mask.visible)

    layout = split("to_q", "to_k", "to_v", out="to_out")
    return adapt(make, layout, call=call, axes=("kv_len", "num_kv_heads", "embed_dim"))


x_transformers_plain, x_transformers_flash = x_transformers(flash=False), x_transformers(flash=True)
