"""Without a mask, LlamaAttention is causal under sdpa and not causal under eager: needs torch and transformers.

`python no_mask.py` exits with 1 while the two differ.
"""

import sys

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

torch.manual_seed(0)
answers = {}
for name in ("eager", "sdpa"):
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, attn_implementation=name)
    torch.manual_seed(1)
    layer, x = LlamaAttention(config, layer_idx=0).eval(), torch.randn(1, 6, 32)
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(6)[None])
    with torch.no_grad():
        answers[name] = layer(x, position_embeddings=positions, attention_mask=None)[0]
apart = float((answers["eager"] - answers["sdpa"]).abs().max())
print("largest difference of eager and sdpa without a mask", apart)
sys.exit(int(apart > 1e-3))
