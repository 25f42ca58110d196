from memory_efficient_attention_pytorch.memory_efficient_attention import memory_efficient_attention

from attnbench.contract.adapters import adapt

memory_efficient = adapt(
    memory_efficient_attention, call=lambda f, q, k, v, mask: f(q, k, v, attn_bias=mask.added(q.dtype))
)
