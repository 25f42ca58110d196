import cpu_torchvision  # noqa: F401 - comes first
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from attnbench.contract.adapters import adapt, packed, transposed

gpt2 = adapt(
    lambda s: GPT2Attention(GPT2Config(n_embd=s.embed_dim, n_head=s.num_heads)),
    transposed(packed("c_attn", out="c_proj")),
    call=lambda m, x, context, mask: m(x, attention_mask=mask.added(x.dtype)),
)
