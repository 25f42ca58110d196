"""At a shape used before, cuDNN's attention gives other gradients if the same incoming gradient has other strides.

    python cudnn_gradient_layout.py            # needs torch and an H100 or H200

It was seen with torch 2.11.0 and cuDNN 9.19; no other version was tried. The plan of a backward pass is stored by the
shapes and strides of query, key and value, but not by those of the incoming gradient, so that the first call decides
how later calls read their gradient. Related: https://github.com/pytorch/pytorch/pull/191576 and issue 150700. The exit
code is 1 if the fault is there, 0 if not, and 2 if nothing could be tried.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    print("nothing was tried: this needs a GPU of NVIDIA with compute capability 9.0 or more, such as an H100")
    raise SystemExit(2)
query, key, value, dense = torch.randn(4, 2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)  # each (B, H, T, K)
strided = dense.transpose(1, 2).contiguous().transpose(1, 2)  # the same numbers, tokens before heads
apart = {}
for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
    with sdpa_kernel(backend):
        output = torch.nn.functional.scaled_dot_product_attention(query.requires_grad_(), key, value)
        first, second = (torch.autograd.grad(output, query, each, retain_graph=True)[0] for each in (dense, strided))
    apart[backend.name] = float((first - second).norm() / first.norm())
print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}: the query's two gradients differ by {apart}")
raise SystemExit(int(not apart["CUDNN_ATTENTION"] < 0.02))  # NaN differs, too
