"""The memory-efficient kernels of xFormers, which take (B, T, H, K)."""

from xformers.ops import memory_efficient_attention


def xformers_memory_efficient(query, key, value):
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return memory_efficient_attention(*heads).transpose(1, 2)
