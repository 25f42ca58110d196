"""The attention of labml's annotated implementations: tokens come first, and so do queries in the mask (T, S, B)."""

from labml_nn.transformers.mha import MultiHeadAttention

from attnbench.contract.adapters import adapt, split


def call(module, x, context, mask):
    visible = None if mask.visible is None else mask.visible[:, 0].expand(-1, mask.sizes[1], -1).permute(1, 2, 0)
    tokens = {"query": x.transpose(0, 1), "key": context.transpose(0, 1), "value": context.transpose(0, 1)}
    return module(**tokens, mask=visible).transpose(0, 1)


labml = adapt(
    lambda s: MultiHeadAttention(s.num_heads, s.embed_dim),
    split("query.linear", "key.linear", "value.linear", out="output"),
    call=call,
    axes=("kv_len",),
)
