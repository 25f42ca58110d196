import cpu_torchvision  # noqa: F401 - comes first
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from attnbench.contract.adapters import adapt, split


def build(s):
    config = LlamaConfig(hidden_size=s.embed_dim, num_attention_heads=s.num_heads, num_key_value_heads=s.num_kv_heads)
    return LlamaAttention(config, layer_idx=0)


def attend(module, x, context, mask):
    positions = torch.arange(x.shape[1])[None]
    return module(x, LlamaRotaryEmbedding(module.config)(x, positions), mask.added(x.dtype))


llama = adapt(build, split("q_proj", "k_proj", "v_proj", out="o_proj"), call=attend, rotary="halves(10000)")
