from performer_pytorch import SelfAttention

from attnbench.contract.adapters import adapt, split

performer_self = adapt(
    lambda s: SelfAttention(s.embed_dim, heads=s.num_heads, dim_head=s.head_dim),
    split("to_q", "to_k", "to_v", out="to_out"),
    masks=("none",),
    approximate=True,
)
