"""PyTorch's own module, through an adapter."""

from torch import nn

from attnbench.contract.adapters import adapt, packed


def call(module, x, context, mask):
    hidden = None if mask.hidden is None else mask.hidden[:, 0]  # (B or 1,1,T or 1,S) -> (B or 1,T or 1,S)
    if hidden is not None:
        heads = (x.shape[0], module.num_heads, *mask.sizes[1:])
        hidden = hidden[:, None].expand(heads).flatten(0, 1)  # -> (B*H,T,S)
    return module(x, context, context, attn_mask=hidden, need_weights=False)


torch_multihead = adapt(
    lambda s: nn.MultiheadAttention(s.embed_dim, s.num_heads, batch_first=True),
    packed("in_proj_{}", out="out_proj"),
    call=call,
    axes=("kv_len",),
)
