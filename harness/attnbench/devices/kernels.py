"""Identify the SDPA backend and the libraries that a call used, by the names of its operators and kernels.

On devices other than the host, the names of an operator's kernels show its backend, because they differ between
libraries.

Source of the names: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml.
"""

import re
from collections.abc import Iterable

from attnbench.storage.records import Operator

BACKENDS = ("flash", "math", "efficient", "cudnn", "overrideable")
"""Backends of `scaled_dot_product_attention`, as in torch.nn.attention.SDPBackend."""
_BACKEND = re.compile(
    r"_scaled_dot_product_(?:fused_)?(?:attention_)?(flash|math|efficient|cudnn|overrideable)"
    r"|\b_(flash|efficient|cudnn)_attention_forward"
)
KERNELS = {
    "PyTorch's FlashAttention 2": ("flash", r"\bpytorch_flash::"),
    "FlashAttention 4": ("flash", r"flash_attncute|FlashAttention(Forward|Backward)Sm\d"),
    "FlashAttention 3": ("flash", r"\bflash::\w*(Sm[89]\d|FwdCombine)|\bflash::enable_sm\d"),
    "FlashAttention 2": ("flash", r"\bflash::flash_(fwd|bwd)"),
    "CUTLASS FMHA": ("efficient", r"\bfmha_cutlass[FB]_"),
    "cuDNN": ("cudnn", r"\bcudnn_generated_\w*(sdpa|flash)"),
    "FlashInfer": ("", r"\bflashinfer::"),
    "SageAttention": ("", r"\bqk_int\w*_attn_kernel"),
    "Triton": ("", r"^triton_"),
}
"""By library of kernels: the SDPA backend that uses it ("": none), and a pattern of the names of its kernels.

Source: aten/src/ATen/native/transformers/cuda of PyTorch (flash_attn, mem_eff_attention); csrc/flash_attn, hopper and
flash_attn/cute of https://github.com/Dao-AILab/flash-attention; include/flashinfer of FlashInfer; SageAttention's csrc.
"""
OWN = ("PyTorch's FlashAttention 2", "CUTLASS FMHA", "cuDNN")  # bundled with PyTorch
COMPILED = "CompiledFxGraph"  # in the name of a graph from torch.compile
_COMPILED = re.compile(rf"{COMPILED}|^triton_|cpp_fused|^graph(_\d+)?_kernel$", re.IGNORECASE)
"""Names of operators and kernels that torch.compile generated."""


def makers(kernels: Iterable[str]) -> list[str]:
    """Return the libraries that contain kernels of these names: keys of KERNELS, in its order; empty if none does."""
    names = list(kernels)
    return [maker for maker, (_, pattern) in KERNELS.items() if any(map(re.compile(pattern).search, names))]


def compiled(calls: Iterable[Operator]) -> bool:
    """Return whether torch.compile generated any of the operators or their kernels."""
    return any(_COMPILED.search(name) for one in calls for name in (one.name, *one.kernels))


def observed(calls: Iterable[Operator]) -> str:
    """Return the backend of `scaled_dot_product_attention` that ran; several are joined by "+", and "" means none.

    If an operator launched kernels that KERNELS assigns to a backend, that backend counts; otherwise, the backend in
    the operator's name.
    """
    backends: set[str] = set()
    for one in calls:
        if match := _BACKEND.search(one.name):
            backends |= {KERNELS[maker][0] for maker in makers(one.kernels)} - {""} or {match[1] or match[2]}
    return "+".join(sorted(backends))
