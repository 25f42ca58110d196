"""Check attention dropout: recover the weights of calls with dropout from their outputs, and test which were dropped.

With dropout probability p, each weight must be 0, or its value without dropout divided by 1 - p. In every part of the
weights, the share of zeros must fit independent draws with probability p. The gradients must belong to the same draw as
the output. Exact tests judge the randomness: they fail a correct implementation once in 10^9 checks. A seed makes a
check repeatable. Two errors are missed: a missing rescaling that is within the dtype's rounding, as in bfloat16 if p is
0.5 %, and a pattern of zeros that repeats only after more than 16 keys.

Attention is linear in its values: if the value of key j is unit vector j, column j of the output is the weight of key
j. In scope `module`, tokens and projections are chosen to have this effect: each token contains a unit vector of its
position, the value projection selects this vector, and the output projection is the identity.

Source of the rescaling: N. Srivastava et al., https://jmlr.org/papers/v15/srivastava14a.html, section 10.

Shapes: N calls; the other letters as in the contract.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnbench.case import TORCH_DTYPES, Case, Inputs, copied, draw_normal, generator, place
from attnbench.checking.calls import GRAD, NO_GRAD, Call, Caller, call_on, caller_of
from attnbench.checking.reference import Reference, UncheckableError, distance, errors
from attnbench.checking.steps import after, wrong
from attnbench.contract import BoundMask, Implementation
from attnbench.contract.declared import words
from attnbench.storage.records import RuleResult
from attnbench.workloads.workload import Workload

FALSE_ALARM = 1e-9  # probability that a rule about randomness fails a correct implementation
NUM_WEIGHTS = 2**13  # the least number of weights to sample, in at least four calls
MOST_KEYS = 16  # few, so that every weight is far above its rounding error, even in half precision
LONGER_LEN = 35  # longest length at which `mean` checks
AXES = ("call", "batch row", "head", "query", "key")  # axes of the weights of all calls (N, B, H, T, S)


class DropoutTrial:
    """The right weights at a small workload, and the weights of a candidate (code under test) in calls with dropout."""

    def __init__(self, caller: Caller, asked: Workload, seed: int) -> None:
        """Call the candidate at a small workload that resembles `asked`; its exceptions propagate."""
        self.caller, self.seed = caller, seed
        # In scope `module` D = H*V, so that the output projection can be the identity.
        width = asked.num_heads * asked.value_dim if asked.scope == "module" else asked.embed_dim
        self.merged = msgspec.structs.replace(asked, embed_dim=width)
        keys = min(asked.kv_len, asked.value_dim, MOST_KEYS)  # one call shows at most one key per column of the values
        queries = keys if asked.seq_len == asked.kv_len else min(asked.seq_len, MOST_KEYS)
        mask = str(asked.mask_rule.at_other_length())
        self.workload = msgspec.structs.replace(self.merged, seq_len=queries, kv_len=keys, mask=mask)
        plain = msgspec.structs.replace(self.workload, dropout=0.0)
        self.right = Reference(plain, unit_inputs(plain, seed), seed)
        self.weights = self.weights_in(self.right.expected["output"])  # (B, H, T, S), right without dropout
        self.rescale = 1 / (1 - asked.dropout)  # the factor of every weight that is kept
        rounding = torch.finfo(TORCH_DTYPES[asked.dtype]).eps * float(self.weights.max())
        limits = self.right.tolerances["output"].of_rows[:, None]
        self.tolerance = (limits + rounding) * self.rescale  # (T, 1), for weights after dropout
        self.measurable = self.weights * self.rescale > 2.5 * self.tolerance  # if kept, clearly not 0
        num_calls = max(4, -(-NUM_WEIGHTS // max(1, int(self.measurable.sum()))))
        # The candidate can read this seed, so it must not reveal the seed of the inputs.
        drawn = int(torch.randint(2**62, (), generator=generator(asked.seed, 7, seed)))
        call = self.new_call()
        answers = [caller.call(replace(call, seed=None if each else drawn)) for each in range(num_calls)]
        seen = [self.weights_in(answer.output) for answer in answers]
        self.sees = self.weights.sum(dim=-1, keepdim=True) > 0  # (B, H, T, 1); a query without keys may get any answer
        self.dropped = torch.stack(seen).where(self.sees, 0.0)  # (N, B, H, T, S) with dropout
        self.zeros = self.dropped.abs() <= self.tolerance

    def weights_in(self, output: Tensor) -> Tensor:
        """Extract weights (B, H, T, S) in float64 on the CPU from the output of a call with unit vectors as values."""
        return by_heads(output, self.workload)[..., : self.workload.kv_len]

    def new_call(self, inputs: Inputs | None = None, workload: Workload | None = None) -> Call:
        """Build a call on copies of `inputs` (default: `unit_inputs`) at `workload` (default: the small workload)."""
        workload = workload or self.workload
        return call_on(copied(inputs or self.right.inputs, workload), workload)

    def is_scaled_by(self, factor: float, tolerance: Tensor) -> bool:
        """Return whether every kept weight is the right weight times `factor`, within `tolerance` (T, 1)."""
        return bool(((self.dropped - factor * self.weights).abs().where(~self.zeros, 0.0) <= tolerance).all())


def unit_inputs(workload: Workload, seed: int, *, are_all_ones: bool = False) -> Inputs:
    """Draw inputs in which the value of key j is unit vector j or, if `are_all_ones`, a vector of ones."""
    drawn, keys = draw_normal(workload, seed), torch.arange(workload.kv_len)
    columns = slice(None) if are_all_ones else keys
    if workload.scope == "attention":
        values = torch.zeros_like(drawn.tensors["value"])
        values[:, :, keys, columns] = 1.0
        changed = {"query": 0.5 * drawn.tensors["query"], "value": values}  # makes weights more even
        return replace(drawn, tensors=drawn.tensors | changed)
    source = "context" if "context" in drawn.tensors else "x"
    tokens = drawn.tensors[source].clone()
    tokens[..., keys] = torch.eye(workload.kv_len, dtype=tokens.dtype)  # each token contains its position's unit vector
    given, zeros = drawn.weights, drawn.weights.map(torch.zeros_like)
    zeros.value[:, columns, keys] = 1.0
    weights = replace(given, query=0.5 * given.query, value=zeros.value, value_bias=zeros.value_bias)
    if given.out is not None:
        weights = replace(weights, out=torch.eye(len(given.out), dtype=given.out.dtype), out_bias=zeros.out_bias)
    return Inputs(tensors=drawn.tensors | {source: tokens}, weights=weights)


def by_heads(output: Tensor, workload: Workload) -> Tensor:
    """Convert an output (B, H, T, V) or (B, T, H*V) to (B, H, T, V), in float64 on the CPU."""
    if workload.scope == "module":
        output = output.unflatten(-1, (workload.num_heads, workload.value_dim)).transpose(1, 2)
    return output.double().cpu()


def rescaled(trial: DropoutTrial) -> str:
    """Check that each weight is 0, or its value without dropout divided by 1 - p."""
    dropped, right, tolerance = trial.dropped, trial.weights, trial.tolerance
    kept = trial.measurable & ~trial.zeros
    if not dropped.isfinite().all():
        return "the output is not finite"
    if kept.any() and trial.is_scaled_by(trial.rescale, tolerance):
        return ""
    if bool(((dropped - right).abs() <= tolerance).all()):
        return "nothing is dropped: the weights are those without dropout"
    factor = float((dropped / right)[kept].median()) if kept.any() else 0.0
    if trial.is_scaled_by(factor, 2 * tolerance):
        p, margin = trial.workload.dropout, 1e-3 + float(tolerance.max())
        share = float(trial.zeros[:, trial.measurable].double().mean())
        known = {"dropout without rescaling": 1.0, "rescaled by 1 - p instead of 1 / (1 - p)": 1 - p}
        kind = next((f"{words}: " for words, number in known.items() if abs(factor - number) <= margin), "")
        lost = f"{share:.1%} of the weights are dropped: dropout is {p:g}"
        return f"{kind}{lost}, and the others multiplied by {factor:.4g}, not by {trial.rescale:.4g}"
    sums = dropped.sum(dim=-1)
    if bool(((sums - 1).abs().where(trial.sees[..., 0], 0.0) <= tolerance[:, 0] * dropped.shape[-1]).all()):
        return "scores are dropped before the softmax, not weights after it: a query's weights still add up to 1"
    expected = (right * trial.rescale).expand_as(dropped)
    at = torch.unravel_index((dropped.where(~trial.zeros, expected) - expected).abs().argmax(), dropped.shape)
    return f"a weight is {float(dropped[at]):.4g}, which is neither 0 nor the rescaled {float(expected[at]):.4g}"


def of_weights(trial: DropoutTrial) -> str:
    """Check that weights are dropped, not columns of the output: if all values are 1, all columns must be equal."""
    call = trial.new_call(place(unit_inputs(trial.workload, trial.seed, are_all_ones=True), trial.workload))
    output = by_heads(trial.caller.call(call).output, trial.workload).where(trial.sees, 0.0)
    spread = float((output.amax(dim=-1) - output.amin(dim=-1)).max())
    if spread <= 0.1 * float(output.abs().max()):
        return ""
    return "the output is dropped, not the weights: if all values are 1, columns of one row differ"


def independent(trial: DropoutTrial, *, is_total: bool = False) -> str:
    """Check that a weight is dropped independently of its neighbour in the next call, batch row, head, query or key.

    Two neighbours are alike if both are dropped or both are kept. The check fails if pairs are alike too often or too
    rarely for independent draws; with `is_total`, only if all pairs are alike.
    """
    p, clear = trial.workload.dropout, trial.measurable.expand_as(trial.zeros)
    chance_to = p**2 + (1 - p) ** 2
    for axis, name in enumerate(AXES):
        length = clear.shape[axis]
        for start in range(min(2, length - 1)):  # disjoint pairs of neighbours along the axis
            zeros, both = (each.narrow(axis, start, length - start).unfold(axis, 2, 2) for each in (trial.zeros, clear))
            alike = (zeros[..., 0] == zeros[..., 1]) & both.all(dim=-1)
            count, size = int(alike.sum()), int(both.all(dim=-1).sum())
            if chance(np.array([count]), np.array([size]), chance_to)[0] >= FALSE_ALARM / (2 * len(AXES)):
                continue
            if count == size:
                return (
                    f"what is dropped does not depend on the {name}: in all {size} pairs both are dropped, or neither"
                )
            if not is_total:
                return f"{count} of {size} weights are dropped or kept as the next {name}'s is, not {chance_to:.1%}"
    return ""


def share(trial: DropoutTrial) -> str:
    """Check that the share of dropped weights is p: overall, and in each call, batch row, head, query and key."""
    zeros, p = trial.zeros & trial.measurable, trial.workload.dropout
    measurable, axes = trial.measurable.expand_as(zeros), range(zeros.dim())
    unlikely = []
    for number, name in enumerate(("", *AXES)):
        others = [axis for axis in axes if axis != number - 1]
        counts, sizes = (each.sum(dim=others).flatten().numpy() for each in (zeros, measurable))
        chances = chance(counts, sizes, p)
        for index in np.flatnonzero(chances < FALSE_ALARM / (1 + len(AXES)) / max(zeros.shape)):
            where = f" in {name} {index}" if name else ""
            dropped = float(counts[index] / sizes[index])
            words = f"{dropped:.1%} of {sizes[index]} weights{where} are dropped: dropout is {p:g}"
            unlikely.append((float(chances[index]), -abs(dropped - p), words))
    return min(unlikely)[-1] if unlikely else ""


def mean(trial: DropoutTrial) -> str:
    """Check at a longer length that two calls differ and, in scope `attention`, that weights add up to 1 on average."""
    longer = trial.merged.at_length(LONGER_LEN) if trial.merged.longest > LONGER_LEN else trial.merged  # several tiles
    plain = msgspec.structs.replace(longer, direction="forward")
    call = trial.new_call(place(draw_normal(plain, trial.seed), plain), plain)
    if plain.scope == "attention":
        call = replace(call, tensors=call.tensors | {"value": torch.ones_like(call.tensors["value"])})
    one, other = (trial.caller.call(replace(call, mode=NO_GRAD)).output for _ in range(2))
    return drops(plain, call.mask, one, other)


def consistent(trial: DropoutTrial) -> str:
    """Check that the output and the gradients of a call come from the same draw."""
    call, right = replace(trial.new_call(), mode=GRAD), trial.right
    assert right.grad_output is not None
    for _ in range(2000):  # until a draw keeps some weight
        answer = trial.caller.call(call)
        seen = trial.weights_in(answer.output)
        if (seen.abs() > trial.tolerance)[trial.measurable].any():
            break
    of_small = (seen / trial.weights).nan_to_num(0.0).clamp(0.0, trial.rescale)
    keep = ((seen.abs() > trial.tolerance).double() * trial.rescale).where(trial.measurable, of_small)
    expected = right.answers_of(wrong("dropped", weights=after("weights", lambda weights: weights * keep)))
    made = trial.caller.pull_back(answer, right.grad_output.clone())
    observed = {"output": answer.output} | right.at_rows(made)
    without = {  # the candidate's errors, rescaled, on top of the right answers without dropout
        name: each + (observed[name].double().cpu() - expected[name]) / trial.rescale
        for name, each in right.expected.items()
        if name in observed and (trial.sees.all() or observed[name].isfinite().all())
    }
    names = ", ".join(each.tensor for each in errors(without, right) if not each.agrees)
    return names and f"the backward pass is not that of the weights which the forward pass dropped: {names}"


def chance(counts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.float64]:
    """Compute the two-sided p-value (n,) of each binomial count (n,) in `sizes` (n,) draws of probability `share`."""
    from scipy.special import bdtr, bdtrc  # imported here, because workers that check no dropout do not need it

    below, above = bdtr(counts.astype(float), sizes, share), bdtrc(counts.astype(float) - 1, sizes, share)
    return np.asarray(np.minimum(1.0, 2 * np.minimum(below, above)), dtype=np.float64)


RULES: dict[str, Callable[[DropoutTrial], str]] = {
    "dropout rescales": rescaled,
    "dropout of weights": of_weights,
    "dropout drawn anew": partial(independent, is_total=True),
    "dropout share": share,
    "dropout independent": independent,
    "dropout mean": mean,
    "dropout gradients": consistent,
}
"""The rules about dropout, by name, in order; each returns a description of the violation, or ""."""


def examine(candidate: Implementation | Caller, workload: Workload, seed: int) -> tuple[RuleResult, ...]:
    """Try RULES in order, up to the first broken one; a rule is also broken if the candidate raises an exception.

    Raises:
        UncheckableError: the candidate raised NotImplementedError: it supports no dropout, or none at these sizes.
    """
    results, trial, caller = list[RuleResult](), None, caller_of(candidate)
    with torch.random.fork_rng([]):  # restores the state of the host's generator
        for name, rule in RULES.items():
            try:
                trial = trial or DropoutTrial(caller, workload, seed)
                broken = rule(trial)
            except Exception as error:
                broken = f"dropout cannot be checked: {words(error)}"
                if type(error).__name__ == NotImplementedError.__name__:  # from another process: a class of this name
                    raise UncheckableError(broken) from error
            results.append(RuleResult(rule=name, holds=not broken, found=broken))
            if broken:
                break
    return tuple(results)


def still_drops(case: Case) -> str:
    """Check the dropout of a timed case; return a description of its error, or "".

    The outputs of two calls must differ, unless they may be equal by chance. In scope `attention` all values are 1 in
    these calls, so each number in a row of the output is the sum of this row's weights. The mean of these sums over all
    rows that see a key must be 1 within Hoeffding's bound, at any length.
    """
    workload = case.workload
    ones = {"value": torch.ones_like(case.tensors["value"])} if workload.scope == "attention" else {}
    with case.holding(ones), torch.no_grad():
        return drops(workload, case.mask, case.output(), case.output())


def drops(workload: Workload, mask: BoundMask, one: Tensor, other: Tensor) -> str:
    """Compare the outputs of two calls as `still_drops` does; return a description of the error, or ""."""
    p, empty = workload.dropout, mask.empty
    num_rows = workload.num_heads * (workload.batch_size * workload.seq_len if empty is None else int((~empty).sum()))
    rounding = min(16 * torch.finfo(one.dtype).eps, 2e-3) * float(one.abs().max())  # roundings depend on addresses
    if distance(one, other) <= rounding and num_rows * math.log(p**2 + (1 - p) ** 2) < math.log(FALSE_ALARM):
        return "two calls drop the same, or nothing"
    if workload.scope == "module":
        return ""
    rows = one.double()[..., 0]  # (B,H,T,V) -> (B,H,T)
    rows = rows if empty is None else rows.where(~empty[..., 0], 0.0)
    average = float(rows.sum()) / num_rows  # a row that sees no key adds 0
    bound = (math.log(2 / FALSE_ALARM) / (2 * num_rows)) ** 0.5 / (1 - p) + 4 * torch.finfo(one.dtype).eps / (1 - p)
    if abs(average - 1) <= bound:
        return ""
    return f"the weights add up to {average:.4g} in the mean, not to 1 within {bound:.2g}"
