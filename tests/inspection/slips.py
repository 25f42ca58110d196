"""Attention as learners write it: each function or class has one slip, and some are right in an unusual way."""

import sys

import torch

from attnbench.contract import Attention


def no_scale(query, key, value, *, mask=None):
    scores = query @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ value


def right(query, key, value, *, mask=None):
    return no_scale(query / query.shape[-1] ** 0.5, key, value, mask=mask)


def raising(query, key, value, *, mask=None):
    raise RuntimeError("out of <ideas>\x1b[31m")


def leaving(query, key, value, *, mask=None):
    sys.stdout.write("not for standard output")
    raise SystemExit(0)


def nan(query, key, value, *, mask=None):
    return torch.full_like(query, float("nan"))


def transposed(query, key, value, *, mask=None):
    return right(query, key, value, mask=mask).transpose(1, 2)


def nothing(query, key, value, *, mask=None):
    return None


def whole(query, key, value, *, mask=None):
    return right(query, key, value, mask=mask).long()


def unmasked(query, key, value):
    return right(query, key, value)


class Swapped(Attention):
    """Returns keys before queries from its projection."""

    def project(self, x, context):
        query, key, value = super().project(x, context)
        return key, query, value

    def attend(self, query, key, value, mask):
        return right(query, key, value, mask=mask.visible)


class Own(Swapped):
    """Returns keys before queries from its projection, too, but uses them in the right places."""

    def forward(self, x, context=None, *, mask):
        key, query, value = self.project(x, x)
        return self.out(self.attend(query, key, value, mask).transpose(1, 2).flatten(2))


class Unbuildable(Attention):
    """Raises in its constructor."""

    def __init__(self, weights):
        raise KeyError("lost")


def slightly_large(query, key, value, *, mask=None):
    return right(query, key, value, mask=mask) * (1 + 9e-6)
