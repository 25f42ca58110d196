import cpu_torchvision  # noqa: F401 - comes first
from litgpt.config import Config
from litgpt.model import CausalSelfAttention, build_rope_cache

from attnbench.contract.adapters import adapt, packed


def build(s):
    config = Config(n_embd=s.embed_dim, n_head=s.num_heads, n_query_groups=s.num_kv_heads, rotary_percentage=1.0)
    return CausalSelfAttention(config, 0)


def attend(module, x, context, mask):
    cos, sin = build_rope_cache(x.shape[1], module.config.rope_n_elem)
    return module(x, cos[None], sin[None])


litgpt_causal = adapt(build, packed("qkv", out="proj"), call=attend, masks=("causal",), rotary="halves(10000)")
