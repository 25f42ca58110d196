"""Functions that a learner would write after the tutorials, with their quirks; test_quirks.py diagnoses each of them.

They take query (B, H, T, K), key (B, H, S, K), value (B, H, S, V), and a boolean mask, True where a key is visible.
"""

import torch
import torch.nn.functional as F
from torch import nn

from attnbench.contract import Attention


def single_head_dim0(query, key, value):
    """Tutorial 000: dimension 0 of one head's scores (T, S) is the query."""

    def head(query, key, value):
        scores = query @ key.T
        weights = F.softmax(scores / key.shape[-1] ** 0.5, dim=0)
        return weights @ value

    batch_size = len(query)
    every = zip(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), strict=True)
    return torch.stack([head(*matrices) for matrices in every]).unflatten(0, (batch_size, -1))


def multi_head_dim0(query, key, value):
    """Tutorial 000: dimension 0 of all heads' scores (H, T, S) is the head."""

    def heads(query, key, value):
        scores = torch.bmm(query, key.transpose(1, 2))
        weights = F.softmax(scores / key.shape[-1] ** 0.5, dim=0)
        return torch.bmm(weights, value)

    return torch.stack([heads(*row) for row in zip(query, key, value, strict=True)])


def mask_lost(query, key, value, *, mask=None):
    """Tutorial 001: masked_fill returns new scores, but the softmax gets the old ones."""
    scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
    if mask is not None:
        scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ value


def dropout_always(query, key, value, *, mask=None):
    """Tutorial 003: a dropout that is also applied in evaluation, since F.dropout drops by default."""
    scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return F.dropout(scores.softmax(dim=-1), p=0.5) @ value


class Declared(Attention):
    """Tutorial 003: a dropout that is declared and never applied."""

    is_applied = False

    def __init__(self, weights):
        super().__init__(weights)
        self.dropout = nn.Dropout(0.5)

    def attend(self, query, key, value, mask):
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
        if mask.hidden is not None:
            scores = scores.masked_fill(mask.hidden, float("-inf"))
        weights = scores.softmax(dim=-1)
        return (self.dropout(weights) if self.is_applied else weights) @ value


class Applied(Declared):
    """Tutorial 003: a dropout applied by a layer that knows whether it trains."""

    is_applied = True
