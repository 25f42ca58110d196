"""MONAI's flash attention keeps its dropout in eval(): needs torch, monai==1.6.1 and einops.

`python eval_dropout.py` exits with 1 while two calls in eval() differ.
"""

import sys

import torch
from monai.networks.blocks.selfattention import SABlock

torch.manual_seed(0)
block = SABlock(hidden_size=32, num_heads=4, dropout_rate=0.1, use_flash_attention=True).eval()
x = torch.randn(1, 16, 32)
with torch.no_grad():
    apart = float((block(x) - block(x)).abs().max())
print("two calls in eval() differ by", apart)
sys.exit(int(apart > 1e-6))
