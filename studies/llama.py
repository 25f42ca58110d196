"""Llama's attention and rotary embedding from transformers: a correct module, which `studies.margins` measures."""

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
        config._attn_implementation = "eager"  # noqa: SLF001 - models of transformers set it, too
        self.attention, self.rotary = LlamaAttention(config, layer_idx=0), LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the output (B, T, D) from x (B, T, D) and, if given, an additive mask (1 or B, 1 or H, 1 or T, T)."""
        places = torch.arange(x.shape[1], device=x.device)[None]
        output: Tensor = self.attention(x, position_embeddings=self.rotary(x, places), attention_mask=mask)[0]
        return output


def called(module: nn.Module, x: Tensor, _context: Tensor, mask: BoundMask) -> Tensor:
    """Call the module on x (B, T, D) with the additive form of the mask; return the output (B, T, D)."""
    output: Tensor = module(x, mask.added(x.dtype))
    return output


llama = adapt(
    Rotating,
    split("attention.q_proj", "attention.k_proj", "attention.v_proj", out="attention.o_proj"),
    call=called,
    rotary="halves(10000)",
    unsupported=lambda workload: "it rotates in float32" if workload.dtype == "float64" else None,
)
