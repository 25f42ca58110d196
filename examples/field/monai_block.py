from monai.networks.blocks import SABlock

from attnbench.contract.adapters import adapt, packed

monai_block = adapt(
    lambda s: SABlock(s.embed_dim, s.num_heads),
    packed("qkv", out="out_proj"),
    call=lambda m, x, context, mask: m(x, mask.visible_as("bs")),
)
