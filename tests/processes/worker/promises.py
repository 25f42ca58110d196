"""Implementations that promise a backend. A run loads them from this file."""

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


careless = Implementation(build=Careless, source="", backend="flash")
unpromised = Implementation(build=Careless, source="")
held = Implementation(build=Held, source="", backend="flash")
