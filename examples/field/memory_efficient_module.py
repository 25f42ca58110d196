from memory_efficient_attention_pytorch import Attention

from attnbench.contract.adapters import adapt, stacked

memory_efficient_module = adapt(
    lambda s: Attention(dim=s.embed_dim, heads=s.num_heads, dim_head=s.head_dim),
    stacked({"to_q": "q", "to_kv": "kv"}, out="to_out"),
    call=lambda m, x, context, mask: m(x, context, attn_bias=mask.added(x.dtype)),
)
