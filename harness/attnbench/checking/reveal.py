"""The attention weights that a candidate really uses, seen from outside: its output for values that are unit vectors.

Attention is linear in the values, so column v of the output is the weight of the key whose value is unit vector v.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnbench.checking.case import build
from attnbench.checking.oracle import attend, masking, seen_rows
from attnbench.checking.reference import Reference
from attnbench.contract import Implementation

SMALL = 1e-3
"""A right weight below this is not asked for its ratio."""
CLOSE = 0.05
ROUNDINGS = 16
"""Weights that are off by no more than this many roundings are right."""


def revealed(attend: Callable[[Tensor], Any], like: Tensor) -> Tensor:
    """The weights (B, H, T, S) behind `attend`, which makes values (B, G, S, V) into a context (B, H, T, V).

    Column j of the values is 1 at one key and 0 elsewhere, so that column j of the context is that key's weight: as
    many keys at a time as there are columns.
    """
    key_len, width = like.shape[-2:]
    columns = []
    for start in range(0, key_len, width):
        count = min(width, key_len - start)
        unit = torch.zeros_like(like)
        unit[:, :, torch.arange(start, start + count), torch.arange(count)] = 1.0
        columns.append(attend(unit)[..., :count])
    return torch.cat(columns, dim=-1)


def weights(implementation: Implementation, reference: Reference) -> Tensor:
    """The weights (B, H, T, S) of a candidate on the inputs of `reference`, which are those of scope `attention`."""

    def attend_to(value: Tensor) -> Tensor:
        case = build(reference.workload, implementation, reference.inputs.map(lambda tensor: tensor.clone()))
        case.tensors["value"] = value
        with torch.no_grad():
            return case.output()

    return revealed(attend_to, reference.inputs.tensors["value"]).double().cpu()


def right_weights(reference: Reference) -> Tensor:
    """What they should be (B, H, T, S), from the oracle."""
    workload, tensors = reference.workload, reference.drawn.tensors
    rows = torch.arange(workload.seq_len)
    eye = torch.eye(workload.kv_len, dtype=torch.float64)
    value = eye.expand(workload.batch_size, workload.num_kv_heads, -1, -1)
    return attend(tensors["query"], tensors["key"], value, masking(workload, rows))


def describe(implementation: Implementation, reference: Reference) -> tuple[str, tuple[str, ...], str]:
    """What the weights tell: words, the mistakes that they fit, and the step. All rows must be at hand."""
    found, right = weights(implementation, reference), right_weights(reference)
    dropped = _dropout(found, right)
    if dropped is not None:
        return dropped
    if float((found - right).abs().max()) <= ROUNDINGS * torch.finfo(reference.inputs.weights.query.dtype).eps:
        return "No known mistake explains it; its weights, seen from outside, are right.", (), "context"
    return (
        f"No known mistake explains it. Its weights, seen from outside: {_facts(found, right, reference)}.",
        (),
        "weights",
    )


def _dropout(found: Tensor, right: Tensor) -> tuple[str, tuple[str, ...], str] | None:
    """Some weights 0 and the others all multiplied by the same: dropout."""
    asked = right > SMALL
    ratio = (found / right)[asked]
    lost = ratio.abs() < CLOSE
    kept = ratio[~lost]
    share = float(lost.double().mean())
    if not 0 < share < 1 or not len(kept) or float((kept / kept.median() - 1).abs().max()) > CLOSE:
        return None
    factor = float(kept.median())
    rescaled = abs(factor - 1) > CLOSE / 2
    name = "dropout_in_evaluation" if rescaled else "dropout_without_rescaling"
    also = f"the others multiplied by {factor:.2f}" if rescaled else "the others as they were, without rescaling"
    words = f"It looks as if dropout is active in evaluation: {share:.0%} of the weights are 0, {also}."
    return f"{words} First step that differs: weights.", (name,), "weights"


def _facts(found: Tensor, right: Tensor, reference: Reference) -> str:
    """The worst weight, the sums, and what is hidden but seen."""
    workload = reference.workload
    seen = seen_rows(workload, torch.arange(workload.seq_len))[:, None].expand_as(found)
    flat = int((found - right).abs().nan_to_num(torch.inf).argmax())
    batch, head, query, key = (int(i) for i in torch.unravel_index(torch.tensor(flat), found.shape))
    worst, expected = float(found.flatten()[flat]), float(right.flatten()[flat])
    facts = [
        f"query {query} gives key {key} {worst:.3g} where {expected:.3g} is right (batch row {batch}, head {head})"
    ]
    sums = found.sum(dim=-1)
    low, high = float(sums.min()), float(sums.max())
    if max(abs(low - 1), abs(high - 1)) > CLOSE:
        facts.append(f"a query's weights add up to {low:.3g} to {high:.3g}, not 1")
    leaked = float(found.where(~seen, 0.0).abs().max())
    if leaked > SMALL:
        facts.append(f"hidden keys get up to {leaked:.3g}")
    return "; ".join(facts)
