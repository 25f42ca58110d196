import cpu_torchvision  # noqa: F401 - comes first
from torch import nn
from vit_pytorch.vit import Attention

from attnbench.contract.adapters import adapt, packed


def build(s):
    if s.num_heads == 1:
        raise NotImplementedError("with one head it has no output projection")
    module = Attention(s.embed_dim, heads=s.num_heads, dim_head=s.head_dim)
    module.norm = nn.Identity()
    return module


vit_attention = adapt(build, packed("to_qkv", out="to_out.0"), masks=("none",))
