import cpu_torchvision  # noqa: F401 - comes first
from timm.layers.attention import Attention

from attnbench.contract.adapters import adapt, packed

timm_attention = adapt(
    lambda s: Attention(s.embed_dim, s.num_heads),
    packed("qkv", out="proj"),
    call=lambda m, x, context, mask: m(x, attn_mask=mask.visible),
)
