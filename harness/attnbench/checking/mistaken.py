"""A known mistake at work: its answer to a reference's question, and as an implementation that makes it."""

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.case import bind
from attnbench.checking.inputs import Inputs
from attnbench.checking.mistakes import Planted
from attnbench.checking.reference import Answer
from attnbench.checking.steps import Scene
from attnbench.contract import Attention, BoundMask, Implementation, Weights
from attnbench.workloads.workload import Workload

BLOCK_SCORES = 2**24
"""Scores that a planted mistake holds at a time, where it can answer some queries after the others."""


def answer(workload: Workload, planted: Planted, rows: Tensor) -> Answer:
    """What the mistake answers at those query rows."""
    mask = bind(workload)

    def ask(inputs: Inputs) -> Tensor:
        chosen = torch.arange(workload.seq_len) if planted.mistake.needs_all_rows else rows
        scene = Scene(mask=mask, rows=chosen)
        tensors = inputs.tensors
        if workload.scope == "attention":
            query = tensors["query"][:, :, chosen]
            made = steps.attend(query, tensors["key"], tensors["value"], scene, planted.changes)["context"]
        else:
            x, context = tensors["x"], tensors.get("context", tensors["x"])
            made = steps.attend_tokens(x[:, chosen], context, inputs.weights, scene, planted.changes)["output"]
        return made.index_select(made.dim() - 2, rows) if planted.mistake.needs_all_rows else made

    return ask


def implementation(planted: Planted) -> Implementation:
    """The textbook form with the mistake, as anybody might hand it in."""
    changes, needs_all = planted.changes, planted.mistake.needs_all_rows

    class Mistaken(Attention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
            num_scores = query.shape[0] * query.shape[1] * key.shape[2]
            block = query.shape[2] if needs_all else max(1, BLOCK_SCORES // num_scores)
            parts = []
            for rows in torch.arange(query.shape[2], device=query.device).split(block):
                whole = len(rows) == query.shape[2]
                at_hand = query if whole else query[:, :, rows]
                parts.append(steps.attend(at_hand, key, value, Scene(mask=mask, rows=rows), changes)["context"])
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

        def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
            scene = Scene(mask=mask, rows=torch.arange(x.shape[1], device=x.device))
            made = steps.attend_tokens(x, x if context is None else context, canonical(self), scene, changes)
            return made["output"]

    return Implementation(build=Mistaken, source=f"attnbench.checking.mistakes: {planted.name}")


def canonical(module: Attention) -> Weights:
    """The canonical weights of a module whose layers are the usual ones."""
    heads = {"query": module.num_heads, "key": module.num_kv_heads, "value": module.num_kv_heads}
    layers = {name: getattr(module, name) for name in heads}
    named: dict[str, Tensor] = {name: layer.weight.unflatten(0, (heads[name], -1)) for name, layer in layers.items()}
    if module.has_bias:
        named |= {f"{name}_bias": layer.bias.unflatten(0, (heads[name], -1)) for name, layer in layers.items()}
    if module.out is not None:
        named["out"] = module.out.weight
        if module.out.bias is not None:
            named["out_bias"] = module.out.bias
    return Weights(**named)
