"""Conventions for a query that sees no key: 0, as in scaled_dot_product_attention, or other common answers.

The textbook form gives NaN. A large finite number instead of minus infinity gives the mean of all values or, if it
preserves the differences between scores, attention without a mask, as cuDNN's. None is wrong by itself. `settle`
replaces such rows, and their effect on gradients, by the right answer, so that the comparison covers everything else.
"""

from collections.abc import Callable
from dataclasses import replace

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
    if only == "":
        return seen, ""
    empty, everywhere = _empty(reference, reference.rows, seen), _empty(reference, None, seen)
    if not empty.any() or reference.workload.sinks != "none":
        return seen, ""
    observed = {name: tensor.double().cpu() for name, tensor in seen.compared.items() if name in reference.expected}
    right = reference.expected["output"]
    is_nan = observed["output"][empty].isnan()
    has_gradients = len(observed) > 1
    form = reference.answers_of(NAN, has_gradients=has_gradients)
    if only in {None, "nan", "nan_gradient"} and (not is_nan.any() or is_nan.all()):
        settled = {
            name: tensor.where(~(tensor.isnan() & form[name].isnan()), reference.expected[name])
            for name, tensor in observed.items()
        }
        key = "nan" if is_nan.all() else "nan_gradient"
        if any(tensor.isnan().any() and not settled[name].isnan().any() for name, tensor in observed.items()):
            constant = {name: each.nan_to_num(0.0) for name, each in seen.compared.items() if name not in observed}
            return _replaced(seen, settled | constant, everywhere, right[empty][0]), key
    shares: list[tuple[float, int, str, dict[str, Tensor]]] = []
    for kind, finite in FINITE:
        if only not in {None, kind}:
            continue
        form, own = (
            reference.answers_of(finite, dtype, has_gradients=has_gradients)
            for dtype in (torch.float64, TORCH_DTYPES[reference.workload.dtype])
        )
        slack = {name: _slack(form[name], own[name], reference, name) for name in observed}
        settled = {  # without the form's effect on the right answer, and without its roundings
            name: reference.expected[name] + softshrink(tensor - form[name], slack[name])
            for name, tensor in observed.items()
        }
        allowed = reference.tolerance("output") + slack["output"]
        from_form, from_right = (largest(observed["output"][empty], each[empty]) for each in (form["output"], right))
        if from_form <= allowed and from_form < NEARER * from_right:
            worst = max(
                largest(each, reference.expected[name]) / reference.tolerance(name) for name, each in settled.items()
            )
            shares.append((worst, len(shares), kind, settled))
    if not shares:
        return seen, ""
    *_, kind, settled = min(shares)
    return _replaced(seen, settled, everywhere, right[empty][0]), kind


def _empty(reference: Reference, rows: Tensor | None, seen: Observation) -> Tensor:
    """Whether each row of an output sees no key: (B, H, R), or (B, R) in scope `module`; `rows` None: all queries."""
    workload = reference.workload
    chosen = torch.arange(workload.seq_len) if rows is None else rows
    if not workload.mask_rule.has_empty_rows(workload.batch_size, workload.seq_len, workload.kv_len):
        return torch.zeros(0, dtype=torch.bool)
    empty = ~row_mask(workload, chosen).seen.any(dim=-1)  # (B,1,R)
    return empty[:, 0] if seen.output.dim() == 3 else empty.expand(-1, workload.num_heads, -1)  # noqa: PLR2004 - (B,R,D)


def _slack(form: Tensor, own: Tensor, reference: Reference, name: str) -> float:
    """The allowed rounding error in a form's effect on the right answer; `own` is the form in the workload's dtype."""
    eps = torch.finfo(TORCH_DTYPES[reference.workload.dtype]).eps
    return YARDSTICKS * largest(own, form) + NUM_ROUNDINGS * eps * largest(form, reference.expected[name])


def _replaced(seen: Observation, settled: dict[str, Tensor], everywhere: Tensor, right: Tensor) -> Observation:
    """The observation with these tensors, and with the right answer (V,) in all rows that see no key."""
    output = seen.output.clone()
    output[everywhere.to(output.device)] = right.to(output)
    return replace(seen, output=output, compared=seen.compared | settled)
