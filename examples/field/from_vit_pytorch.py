"""The attention of vit-pytorch, without the LayerNorm that it begins with."""

import cpu_torchvision  # noqa: F401 - comes first
from torch import nn
from vit_pytorch.vit import Attention

from attnbench.contract.adapters import adapt, packed


def make(s):
    module = Attention(s.embed_dim, heads=s.num_heads, dim_head=s.head_dim)
    module.norm = nn.Identity()
    return module


vit_pytorch = adapt(make, packed("to_qkv", out="to_out.0"), axes=("embed_dim",))
