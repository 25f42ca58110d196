import cpu_torchvision  # noqa: F401 - comes first
import torch
from self_attention_cv import MultiHeadSelfAttention

from attnbench.contract.adapters import Layout, adapt


def pack(weights):
    rows = torch.stack([weights.query, weights.key, weights.value])
    return {"to_qvk.weight": rows.permute(2, 0, 1, 3).flatten(0, 2), "W_0.weight": weights.out}


self_attention_cv_multihead = adapt(
    lambda s: MultiHeadSelfAttention(s.embed_dim, heads=s.num_heads),
    Layout(pack=pack),
    call=lambda m, x, context, mask: m(x, mask.hidden_as("ts")),
)
