"""Conventions for a query that sees no key: 0, as in scaled_dot_product_attention, or other common answers.

The textbook form gives NaN. A large finite number instead of minus infinity gives the mean of all values or, if it
preserves the differences between scores, attention without a mask, as cuDNN's. None is wrong by itself. `settle`
replaces such rows, and their effect on gradients, by the right answer, so that the comparison covers everything else.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from attnbench.checking.case import TORCH_DTYPES
from attnbench.checking.oracle import RowMask, row_mask
from attnbench.checking.reference import Observation, Reference, largest
from attnbench.checking.steps import Mistake, hide, wrong

NEARER = 0.25
"""An answer follows a form if its distance to it is at most this share of its distance to 0."""
YARDSTICKS, NUM_ROUNDINGS = 2.5, 4.0
"""The limit for the effect of queries that see no key: in yardstick errors of the dtype, and in roundings."""


def infinite(scores: Tensor, mask: RowMask) -> Tensor:
    """Add minus infinity, through which NaN reaches all gradients; filling it in would stop it."""
    return mask.changed(scores) + torch.zeros_like(scores).masked_fill(~mask.seen, -torch.inf)


def filled(scores: Tensor, mask: RowMask) -> Tensor:
    """Equal scores, without a gradient, for queries that see no key."""
    return hide(mask.changed(scores), mask.seen).masked_fill(~mask.seen.any(dim=-1, keepdim=True), 0.0)


def added(scores: Tensor, mask: RowMask) -> Tensor:
    """Equal scores with a gradient, as they are after adding a large number."""
    changed = mask.changed(scores)
    return hide(changed, mask.seen).where(mask.seen.any(dim=-1, keepdim=True), changed - changed.detach())


def kept(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores as they are, as if nothing were hidden from these queries."""
    changed = mask.changed(scores)
    return hide(changed, mask.seen).where(mask.seen.any(dim=-1, keepdim=True), changed)


def convention(kind: str, form: Callable[[Tensor, RowMask], Tensor]) -> Mistake:
    """The textbook form with that convention: its softmax is NaN where every score is minus infinity."""
    return wrong(f"{kind}_where_nothing_is_seen", "", masked_scores=form, weights=lambda x, _: x.softmax(dim=-1))


NAN = convention("nan", infinite)
FINITE = [("mean", convention("mean", filled)), ("mean", convention("mean", added)), ("all", convention("all", kept))]
"""The conventions with numbers, by their names in CONVENTIONS."""


def settle(seen: Observation, reference: Reference, only: str | None = None) -> tuple[Observation, str]:
    """Replace answers for queries that see no key by the right one; also return which of `CONVENTIONS` they had.

    The convention is "" if there are no such queries, or if their answer is right or matches no convention: nothing is
    changed. `only` is the convention on another probe, since it is the same on all.
    """
    every = None if only == "" else _empty_rows(seen, reference)
    if every is None or not (empty := every[..., reference.rows]).any():
        return seen, ""
    expected = reference.expected
    observed = {name: tensor.double().cpu() for name, tensor in seen.compared.items() if name in expected}
    right, actual = expected["output"][empty], observed["output"][empty]
    answers_of = partial(reference.answers_of, has_gradients=len(observed) > 1)

    def replaced(settled: dict[str, Tensor], kind: str) -> tuple[Observation, str]:
        output = seen.output.clone()
        output[every.to(output.device)] = right[0].to(output)
        return replace(seen, output=output, compared=seen.compared | settled), kind

    is_nan = actual.isnan()
    if only in {None, "nan", "nan_gradient"} and (not is_nan.any() or is_nan.all()):
        form = answers_of(NAN)
        settled = {
            name: tensor.where(~(tensor.isnan() & form[name].isnan()), expected[name])
            for name, tensor in observed.items()
        }
        if any(tensor.isnan().any() and not settled[name].isnan().any() for name, tensor in observed.items()):
            constant = {name: each.nan_to_num(0.0) for name, each in seen.compared.items() if name not in observed}
            return replaced(settled | constant, "nan" if is_nan.all() else "nan_gradient")
    candidates: list[tuple[float, int, str, dict[str, Tensor]]] = []
    dtype = TORCH_DTYPES[reference.workload.dtype]
    for kind, finite in FINITE:
        if only not in {None, kind}:
            continue
        form, rounded = answers_of(finite), answers_of(finite, dtype)
        slack = {  # the rounding error of the form's effect on the right answer
            name: YARDSTICKS * largest(rounded[name], form[name])
            + NUM_ROUNDINGS * torch.finfo(dtype).eps * largest(form[name], expected[name])
            for name in observed
        }
        settled = {
            name: expected[name] + softshrink(tensor - form[name], slack[name]) for name, tensor in observed.items()
        }
        from_form, from_right = largest(actual, form["output"][empty]), largest(actual, right)
        if from_form <= reference.tolerance("output") + slack["output"] and from_form < NEARER * from_right:
            worst = max(largest(each, expected[name]) / reference.tolerance(name) for name, each in settled.items())
            candidates.append((worst, len(candidates), kind, settled))
    if not candidates:
        return seen, ""
    *_, kind, settled = min(candidates)
    return replaced(settled, kind)


def _empty_rows(seen: Observation, reference: Reference) -> Tensor | None:
    """Whether each row of a whole output may get any answer: (B, H, T), or (B, T) in scope `module`; None if none."""
    workload = reference.workload
    sizes = workload.batch_size, workload.seq_len, workload.kv_len
    if workload.sinks != "none" or not workload.mask_rule.has_empty_rows(*sizes):
        return None
    empty = ~row_mask(workload, torch.arange(workload.seq_len)).seen.any(dim=-1)  # (B,1,T)
    return empty[:, 0] if seen.output.dim() == 3 else empty.expand(-1, workload.num_heads, -1)  # noqa: PLR2004 - (B,T,D)
