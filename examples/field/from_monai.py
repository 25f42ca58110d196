"""The self-attention block of MONAI with dropout, which eval() should turn off: docs/findings.md."""

from monai.networks.blocks.selfattention import SABlock

from attnbench.contract.adapters import adapt, packed


def monai(**options):
    return adapt(
        lambda s: SABlock(s.embed_dim, s.num_heads, qkv_bias=s.qkv_bias, **options), packed("qkv", out="out_proj")
    )


monai_dropout = monai(dropout_rate=0.1)
monai_flash_dropout = monai(use_flash_attention=True, dropout_rate=0.1)
