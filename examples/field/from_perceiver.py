"""The cross-attention of perceiver-pytorch. Keys and values share a layer, and masks are of keys alone."""

from perceiver_pytorch.perceiver_pytorch import Attention

from attnbench.contract.adapters import adapt, stacked


def call(module, x, context, mask):
    return module(x, context, mask=mask.visible[:, 0, 0].expand(len(x), -1) if mask.is_padding else None)


perceiver = adapt(
    lambda s: Attention(s.embed_dim, heads=s.num_heads, dim_head=s.head_dim),
    stacked({"to_q": "q", "to_kv": "kv"}, out="to_out"),
    call=call,
    masks=("none", "padding"),
    axes=("kv_len", "embed_dim"),
)
