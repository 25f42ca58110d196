from labml_nn.transformers.mha import MultiHeadAttention

from attnbench.contract.adapters import adapt, split


def attend(module, x, context, mask):
    x, context = x.transpose(0, 1), context.transpose(0, 1)
    return module(query=x, key=context, value=context, mask=mask.visible_as("tsb")).transpose(0, 1)


labml_multihead = adapt(
    lambda s: MultiHeadAttention(s.num_heads, s.embed_dim),
    split("query.linear", "key.linear", "value.linear", out="output"),
    call=attend,
)
