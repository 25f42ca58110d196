"""The attention of Segment Anything's mask decoder, for queries and keys of two sources. It takes no mask."""

from segment_anything.modeling.transformer import Attention

from attnbench.contract.adapters import adapt, split

segment_anything = adapt(
    lambda s: Attention(s.embed_dim, s.num_heads),
    split("q_proj", "k_proj", "v_proj", out="out_proj"),
    call=lambda module, x, context, mask: module(x, context, context),
    masks=("none",),
    axes=("kv_len",),
)
