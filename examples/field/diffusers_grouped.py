from diffusers.models.attention_processor import Attention

from attnbench.contract.adapters import adapt, split

diffusers_grouped = adapt(
    lambda s: Attention(s.embed_dim, heads=s.num_heads, kv_heads=s.num_kv_heads, dim_head=s.head_dim),
    split("to_q", "to_k", "to_v", out="to_out.0"),
    call=lambda m, x, context, mask: m(x, context, mask.added_as("nts", x.dtype)),
)
