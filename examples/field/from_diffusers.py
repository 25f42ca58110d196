"""The attention of diffusers with both of its processors. Masks are added to the scores."""

from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

from attnbench.contract.adapters import adapt, split


def diffusers(processor):
    def make(s):
        biases = {"bias": s.qkv_bias, "out_bias": s.out_bias}
        return Attention(s.embed_dim, heads=s.num_heads, dim_head=s.head_dim, processor=processor(), **biases)

    def call(module, x, context, mask):
        added = None
        if mask.hidden is not None:
            size = (x.shape[0], *mask.sizes[1:])
            added = x.new_zeros(size).masked_fill(mask.hidden[:, 0], float("-inf"))  # (B,T,S)
        return module(x, context, attention_mask=added)

    return adapt(make, split("to_q", "to_k", "to_v", out="to_out.0"), call=call, axes=("kv_len", "embed_dim"))


diffusers_plain, diffusers_sdpa = diffusers(AttnProcessor), diffusers(AttnProcessor2_0)
