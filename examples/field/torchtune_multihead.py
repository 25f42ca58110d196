from torch import nn
from torchtune.modules import MultiHeadAttention

from attnbench.contract.adapters import adapt, split


def build(s):
    return MultiHeadAttention(
        embed_dim=s.embed_dim,
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        q_proj=nn.Linear(s.embed_dim, s.embed_dim),
        k_proj=nn.Linear(s.embed_dim, s.num_kv_heads * s.head_dim),
        v_proj=nn.Linear(s.embed_dim, s.num_kv_heads * s.head_dim),
        output_proj=nn.Linear(s.embed_dim, s.embed_dim),
        is_causal=False,
    )


torchtune_multihead = adapt(
    build,
    split("q_proj", "k_proj", "v_proj", out="output_proj"),
    call=lambda m, x, context, mask: m(x, context, mask=mask.visible_as("bts")),
)
