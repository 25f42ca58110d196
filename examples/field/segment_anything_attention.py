import cpu_torchvision  # noqa: F401 - comes first
from segment_anything.modeling.transformer import Attention

from attnbench.contract.adapters import adapt, split

segment_anything_attention = adapt(
    lambda s: Attention(s.embed_dim, s.num_heads),
    split("q_proj", "k_proj", "v_proj", out="out_proj"),
    call=lambda m, x, context, mask: m(x, context, context),
    masks=("none",),
)
