import cpu_torchvision  # noqa: F401 - comes first
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from attnbench.contract.adapters import adapt, split

t5 = adapt(
    lambda s: T5Attention(T5Config(d_model=s.embed_dim, d_kv=s.head_dim, num_heads=s.num_heads)),
    split("q", "k", "v", out="o"),
    call=lambda m, x, context, mask: m(x, mask.added(x.dtype), context),
    scale=1.0,
)
