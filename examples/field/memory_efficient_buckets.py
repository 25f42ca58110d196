from memory_efficient_attention_pytorch import Attention

from attnbench.contract.adapters import adapt, stacked

BUCKETS = {"memory_efficient": True, "q_bucket_size": 16, "k_bucket_size": 16}
memory_efficient_buckets = adapt(
    lambda s: Attention(dim=s.embed_dim, heads=s.num_heads, dim_head=s.head_dim, **BUCKETS),
    stacked({"to_q": "q", "to_kv": "kv"}, out="to_out"),
    call=lambda m, x, context, mask: m(x, context, attn_bias=mask.added_as("bhts", x.dtype)),
)
