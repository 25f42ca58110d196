import cpu_torchvision  # noqa: F401 - comes first
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperAttention

from attnbench.contract.adapters import adapt, split

whisper = adapt(
    lambda s: WhisperAttention(s.embed_dim, s.num_heads, config=WhisperConfig()),
    split("q_proj", "k_proj", "v_proj", out="out_proj"),
    call=lambda m, x, context, mask: m(x, context, attention_mask=mask.added(x.dtype)),
)
