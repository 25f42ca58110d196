from perceiver_pytorch.perceiver_pytorch import Attention

from attnbench.contract.adapters import adapt, stacked

perceiver = adapt(
    lambda s: Attention(s.embed_dim, heads=s.num_heads, dim_head=s.head_dim),
    stacked({"to_q": "q", "to_kv": "kv"}, out="to_out"),
    call=lambda m, x, context, mask: m(x, context, mask.visible_as("bs")),
)
