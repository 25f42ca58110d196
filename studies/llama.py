"""Llama's attention from transformers, with its rotary embedding inside: an honest module of `studies.margins`."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from attnbench.contract import BoundMask
from attnbench.contract.adapters import Sizes, adapt, split


class Rotating(nn.Module):
    """The attention and the rotary embedding of a Llama layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=sizes.embed_dim,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
        )
        config._attn_implementation = "eager"  # noqa: SLF001 - what its models set
        self.attention, self.rotary = LlamaAttention(config, layer_idx=0), LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, D), and numbers that are added to the scores -> (B, T, D)."""
        places = torch.arange(x.shape[1], device=x.device)[None]
        output: Tensor = self.attention(x, position_embeddings=self.rotary(x, places), attention_mask=mask)[0]
        return output


def called(module: nn.Module, x: Tensor, _context: Tensor, mask: BoundMask) -> Tensor:
    """The module's output under the mask."""
    output: Tensor = module(x, mask.added(x.dtype))
    return output


llama = adapt(
    Rotating,
    split("attention.q_proj", "attention.k_proj", "attention.v_proj", out="attention.o_proj"),
    call=called,
    rotary="halves(10000)",
    unsupported=lambda workload: "it rotates in float32" if workload.dtype == "float64" else None,
)
