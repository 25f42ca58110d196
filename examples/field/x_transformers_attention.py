from x_transformers.x_transformers import Attention

from attnbench.contract.adapters import adapt, split

x_transformers_attention = adapt(
    lambda s: Attention(s.embed_dim, dim_head=s.head_dim, heads=s.num_heads, project_out=True),
    split("to_q", "to_k", "to_v", out="to_out"),
    call=lambda m, x, context, mask: m(x, context, attn_mask=mask.visible),
)
