"""Memory-efficient attention in plain PyTorch, in small buckets, and its plain form. Keys and values share a layer."""

from memory_efficient_attention_pytorch.memory_efficient_attention import Attention

from attnbench.contract.adapters import adapt, stacked


def memory_efficient(**buckets):
    def make(s):
        return Attention(dim=s.embed_dim, heads=s.num_heads, dim_head=s.head_dim, **buckets)

    def call(module, x, context, mask):
        module.causal = mask.is_causal
        return module(x, context, mask=mask.visible[:, 0, 0].expand(len(x), -1) if mask.is_padding else None)

    layout = stacked({"to_q": "q", "to_kv": "kv"}, out="to_out")
    masks = ("none", "causal", "padding")
    return adapt(make, layout, call=call, masks=masks, axes=("kv_len", "embed_dim"))


memory_efficient_plain = memory_efficient()
memory_efficient_buckets = memory_efficient(memory_efficient=True, q_bucket_size=16, k_bucket_size=24)
