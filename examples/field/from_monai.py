"""The self-attention block of MONAI: written out, with its flash option, and with dropout, which eval() should end."""

from monai.networks.blocks.selfattention import SABlock

from attnbench.contract.adapters import adapt, packed


def monai(**options):
    def make(s):
        return SABlock(s.embed_dim, s.num_heads, qkv_bias=s.qkv_bias, **options)

    def call(module, x, context, mask):
        if mask.visible is None:
            return module(x)
        visible = mask.visible[:, 0, 0].expand(len(x), -1)  # (B,S), as its documentation has it
        return module(x, attn_mask=visible)

    return adapt(make, packed("qkv", out="out_proj"), call=call, masks=("none", "padding"))


monai_written_out = monai()
monai_flash = monai(use_flash_attention=True)
monai_dropout = monai(dropout_rate=0.1)
monai_flash_dropout = monai(use_flash_attention=True, dropout_rate=0.1)
