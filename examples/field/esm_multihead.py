from esm.multihead_attention import MultiheadAttention

from attnbench.contract.adapters import adapt, split


def attend(module, x, context, mask):
    x, context = x.transpose(0, 1), context.transpose(0, 1)
    return module(x, context, context, attn_mask=mask.added_as("nts", x.dtype))[0].transpose(0, 1)


esm_multihead = adapt(
    lambda s: MultiheadAttention(s.embed_dim, s.num_heads),
    split("q_proj", "k_proj", "v_proj", out="out_proj"),
    call=attend,
)
