"""Attention with a hand-written backward pass in which some steps are changed."""

import math

import torch


class Backward(torch.autograd.Function):
    """Attention in which `changes`, functions by step, replace the result of a step of the backward pass.

    A change gets the result of its step; the change `made` gets all gradients, and the saved tensors.
    """

    @staticmethod
    def forward(ctx, query, key, value, hidden, changes):
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        masked = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        weights = masked.softmax(-1)
        ctx.save_for_backward(query, key, value, scores - masked.logsumexp(-1, keepdim=True), weights)
        ctx.changes = changes
        return weights @ value

    @staticmethod
    def backward(ctx, grad):
        query, key, value, logs, weights = ctx.saved_tensors

        def step(name, tensor, *more):
            return ctx.changes[name](tensor, *more) if name in ctx.changes else tensor

        grad, weights = step("grad", grad), step("weights", weights, logs)
        along = grad @ value.mT
        sums = step("sums", (weights * along).sum(-1, keepdim=True))
        of_scores = weights * (along - sums) / math.sqrt(query.shape[-1])
        made = of_scores @ step("key", key), step("of_keys", of_scores).mT @ query, weights.mT @ grad
        return *step("made", made, ctx.saved_tensors), None, None
