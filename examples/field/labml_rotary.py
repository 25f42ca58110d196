from labml_nn.transformers.rope import RotaryPEMultiHeadAttention

from attnbench.contract.adapters import adapt, split


def attend(module, x, context, mask):
    x = x.transpose(0, 1)
    return module(query=x, key=x, value=x, mask=mask.visible_as("tsb")).transpose(0, 1)


labml_rotary = adapt(
    lambda s: RotaryPEMultiHeadAttention(s.num_heads, s.embed_dim, rope_percentage=1.0),
    split("query.linear", "key.linear", "value.linear", out="output"),
    call=attend,
    rotary="halves(10000)",
)
