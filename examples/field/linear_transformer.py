from linear_attention_transformer.linear_attention_transformer import SelfAttention

from attnbench.contract.adapters import adapt, split

linear_transformer = adapt(
    lambda s: SelfAttention(s.embed_dim, s.num_heads),
    split("to_q", "to_k", "to_v", out="to_out"),
    masks=("none",),
    approximate=True,
)
