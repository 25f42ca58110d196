import cpu_torchvision  # noqa: F401 - comes first
from open_clip.transformer import Attention

from attnbench.contract.adapters import adapt, packed

open_clip_attention = adapt(
    lambda s: Attention(s.embed_dim, s.num_heads),
    packed("in_proj_{}", out="out_proj"),
    call=lambda m, x, context, mask: m(x, mask.added(x.dtype)),
)
