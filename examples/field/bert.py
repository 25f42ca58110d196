import cpu_torchvision  # noqa: F401 - comes first
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

from attnbench.contract.adapters import adapt, split

bert = adapt(
    lambda s: BertSelfAttention(BertConfig(hidden_size=s.embed_dim, num_attention_heads=s.num_heads)),
    split("query", "key", "value", out=None),
    call=lambda m, x, context, mask: m(x, mask.added(x.dtype)),
)
