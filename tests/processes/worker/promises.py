"""Implementations that promise a backend, or misbehave only under observation. A run loads them from this file."""

import os

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.contract import Attention, Implementation


def everything(query, key):
    """A mask of three dimensions, which PyTorch's flash kernel does not take."""
    return torch.ones(query.shape[1], query.shape[2], key.shape[2], dtype=torch.bool)


class Careless(Attention):
    """Does not notice that it runs math."""

    def attend(self, query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=everything(query, key))


class Held(Attention):
    """Restricts PyTorch to a backend that is unavailable."""

    def attend(self, query, key, value, mask):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=everything(query, key))


class Shy(Attention):
    """Dies under a profiler."""

    def attend(self, query, key, value, mask):
        if torch.autograd._profiler_enabled():
            os._exit(3)
        return F.scaled_dot_product_attention(query, key, value)


class Sulking(Attention):
    """Raises under a profiler."""

    def attend(self, query, key, value, mask):
        if torch.autograd._profiler_enabled():
            raise RuntimeError("not while you look")
        return F.scaled_dot_product_attention(query, key, value)


careless = Implementation(build=Careless, source="", backend="flash")
unpromised = Implementation(build=Careless, source="")
held = Implementation(build=Held, source="", backend="flash")
shy = Implementation(build=Shy, source="", backend="flash")
sulking = Implementation(build=Sulking, source="", backend="flash")
