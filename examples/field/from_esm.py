"""The attention of ESM-2, made from fairseq's: tokens come first, and masks are added to the scores."""

from esm.multihead_attention import MultiheadAttention

from attnbench.contract.adapters import adapt, split


def esm(**options):
    def call(module, x, context, mask):
        padding, added = None, None
        if mask.is_padding:
            padding = mask.hidden[:, 0, 0].expand(len(x), -1)  # (B,S)
        elif mask.hidden is not None:
            added = x.new_zeros(mask.sizes[1:]).masked_fill(mask.hidden[0, 0], float("-inf"))  # (T,S)
        tokens = x.transpose(0, 1), context.transpose(0, 1), context.transpose(0, 1)  # (B,T,D) -> (T,B,D)
        return module(*tokens, key_padding_mask=padding, attn_mask=added, **options)[0].transpose(0, 1)

    layout = split("q_proj", "k_proj", "v_proj", out="out_proj")
    return adapt(lambda s: MultiheadAttention(s.embed_dim, s.num_heads), layout, call=call, axes=("kv_len",))


esm_torch, esm_own = esm(), esm(need_head_weights=True)
