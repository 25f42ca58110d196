"""Is attention dropout right? The weights that were dropped, seen from outside, held against what chance may do.

Each weight must be 0, or what it is without dropout divided by 1 - p; the share of zeros must be that of independent
draws, everywhere; and the gradients must be those of the very weights that were dropped. What is random is judged by
exact tests, which fail an honest implementation once in 10^9 checks, and from a seed, so that a check repeats. What it
cannot see: a rescaling that the dtype rounds away, as bfloat16 does at 0.5 %, and draws that repeat beyond 16 keys.

Source of the rescaling: N. Srivastava et al., https://jmlr.org/papers/v15/srivastava14a.html, section 10.

Shapes: N calls, B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnbench.checking import oracle
from attnbench.checking.case import Case, fill, place
from attnbench.checking.deviation import allowed, errors, gradients
from attnbench.checking.dropped import (
    NUM_WEIGHTS,
    Trial,
    by_heads,
    for_heads,
    merged_inputs,
    unit_inputs,
    unit_values,
    weights_in,
)
from attnbench.checking.reference import refer_to
from attnbench.contract import Implementation
from attnbench.devices import device
from attnbench.storage.records import RuleResult
from attnbench.workloads.workload import Workload

FALSE_ALARM = 1e-9
MEAN_CALLS = 16
MOST_DRAWS = 2000
FEW = 1e-3
AXES = ("call", "batch row", "head", "query", "key")


def rescaled(trial: Trial) -> str:
    """Each weight is 0, or what it is without dropout divided by 1 - p."""
    found, right, off = trial.dropped, trial.weights, trial.off
    kept = trial.told & ~trial.zeros
    if not found.isfinite().all():
        return "the output is not finite"
    if kept.any() and _is_scaled(trial, trial.rescale, off):
        return ""
    if float((found - right).abs().max()) <= off:
        return "nothing is dropped: the weights are those without dropout"
    factor = float((found / right)[kept].median()) if kept.any() else 0.0
    if _is_scaled(trial, factor, 2 * off):
        return _told_by_its_factor(trial, factor)
    sums, sees = found.sum(dim=-1), right.sum(dim=-1) > 0
    if float((sums - 1).abs().where(sees, 0.0).max()) <= off * found.shape[-1]:
        return (
            "the scores are dropped before the softmax, not the weights after it: a query's weights add up to 1 still"
        )
    flat = int((found - right * trial.rescale).abs().where(~trial.zeros, 0.0).argmax())
    place = torch.unravel_index(torch.tensor(flat), found.shape)
    expected = float(right[place[1:]]) * trial.rescale
    return f"a weight is {float(found[place]):.4g}, which is neither 0 nor {expected:.4g}, what rescaling makes of it"


def _is_scaled(trial: Trial, factor: float, off: float) -> bool:
    """Whether every weight that is not 0 is the right one times a factor."""
    return float((trial.dropped - factor * trial.weights).abs().where(~trial.zeros, 0.0).max()) <= off


def _told_by_its_factor(trial: Trial, factor: float) -> str:
    """What is wrong where all weights that are kept are multiplied by the same, which is not 1 / (1 - p)."""
    p, near = trial.workload.dropout, FEW + trial.off
    lost = float(trial.zeros[:, trial.told].double().mean())
    told = (
        f"{lost:.1%} of the weights are dropped and the others multiplied by {factor:.4g}, not by {trial.rescale:.4g}"
    )
    if abs(factor - 1) <= near:
        return f"dropout without rescaling: {told}"
    if abs(factor - (1 - p)) <= near:
        return f"rescaled by 1 - p instead of 1 / (1 - p): {told}"
    if abs(factor * (1 - lost) - 1) <= 4 * math.sqrt(factor / NUM_WEIGHTS) + near:
        return f"as with a dropout of {1 - 1 / factor:.3g} instead of {p:g}: {told}"
    return told


def of_weights(trial: Trial) -> str:
    """Weights are dropped, not columns of the output: where all values are 1, all columns are alike."""
    case = trial.case(place(unit_inputs(trial.workload, trial.seed, alike=True), trial.workload))
    with case.grad_mode():
        output = by_heads(case.output().detach(), trial.workload)
    spread = float((output.amax(dim=-1) - output.amin(dim=-1)).max())
    if spread <= 0.1 * float(output.abs().max()):
        return ""
    return "the output is dropped, not the weights: where all values are 1, columns of one row differ"


def drawn_anew(trial: Trial) -> str:
    """Calls, batch rows, heads, queries and keys do not all drop the same."""
    for name, count, size, alike in _shared_fates(trial):
        if count == size:
            return f"what is dropped does not depend on the {name}: all {size} pairs share their fate, not {alike:.1%}"
    return ""


def share(trial: Trial) -> str:
    """The share that is dropped is p: overall, and for each call, batch row, head, query and key."""
    zeros, p = trial.zeros & trial.told, trial.workload.dropout
    told = trial.told.expand_as(zeros)
    groups: list[tuple[str, list[int]]] = [("", list(range(zeros.dim())))]
    groups += [(name, [axis for axis in range(zeros.dim()) if axis != own]) for own, name in enumerate(AXES)]
    level = FALSE_ALARM / len(groups) / max(zeros.shape)
    found = []
    for name, others in groups:
        counts, sizes = zeros.sum(dim=others).flatten().numpy(), told.sum(dim=others).flatten().numpy()
        chances = chance(counts, sizes, p)
        for index in np.flatnonzero(chances < level):
            where = f" in {name} {index}" if name else ""
            dropped = float(counts[index] / sizes[index])
            words = f"{dropped:.1%} of {sizes[index]} weights{where} are dropped: dropout is {p:g}"
            found.append((float(chances[index]), -abs(dropped - p), words))
    return min(found)[-1] if found else ""


def independent(trial: Trial) -> str:
    """Neighbours share their fate no more often, and no less, than by chance."""
    for name, count, size, alike in _shared_fates(trial):
        return f"{count / size:.1%} of {size} weights share their fate with the next {name}'s, not {alike:.1%}"
    return ""


def _shared_fates(trial: Trial) -> Iterator[tuple[str, int, int, float]]:
    """Where neighbours agree with a frequency that chance does not make: axis, how many of so many, the chance to."""
    p = trial.workload.dropout
    alike = p**2 + (1 - p) ** 2
    told = trial.told.expand_as(trial.zeros)
    for axis, name in enumerate(AXES):
        for count, size in _agreeing(trial.zeros, told, axis):
            if chance(np.array([count]), np.array([size]), alike)[0] < FALSE_ALARM / (2 * len(AXES)):
                yield name, count, size, alike


def _agreeing(zeros: Tensor, told: Tensor, axis: int) -> Iterator[tuple[int, int]]:
    """How many of so many weights share the fate of their neighbour, in disjoint pairs along an axis."""
    length = zeros.shape[axis]
    for start in (0, 1):
        count = (length - start) // 2
        if count:
            one, other = (slice(start + shift, start + 2 * count, 2) for shift in (0, 1))
            pairs = [tuple(each if dim == axis else slice(None) for dim in range(zeros.dim())) for each in (one, other)]
            both = told[pairs[0]] & told[pairs[1]]
            yield int(((zeros[pairs[0]] == zeros[pairs[1]]) & both).sum()), int(both.sum())


def mean(trial: Trial) -> str:
    """The mean of many calls approaches the answer without dropout, on other values and more keys.

    Each term is 0 or w * v / (1 - p), so that a bound on the mean of n calls follows from the terms' squares alone: W.
    Hoeffding (1963), theorem 2, https://doi.org/10.1080/01621459.1963.10500830.
    """
    plain = trial.longer
    right = refer_to(plain, merged_inputs(plain, trial.seed), trial.seed)
    squares = oracle.answer(plain, right.drawn, right.rows, _squared)
    case = trial.case(right.inputs, msgspec.structs.replace(plain, dropout=trial.asked.dropout, direction="forward"))
    outputs = [case.output().detach().double().cpu() for _ in range(MEAN_CALLS)]
    found = torch.stack(outputs).mean(dim=0).index_select(-2, right.rows)
    rescale = 1 / (1 - trial.asked.dropout)
    chances = math.log(2 * found.numel() / FALSE_ALARM)
    reach = rescale * (squares.sqrt() * (chances / (2 * MEAN_CALLS)) ** 0.5 + allowed("output", right))
    if bool(((found - right.expected["output"]).abs() <= reach).all()):
        return ""
    return f"the mean of {MEAN_CALLS} calls is further from the answer without dropout than chance may take it"


def _squared(query: Tensor, key: Tensor, value: Tensor, under: Any) -> Tensor:  # noqa: ANN401 - as the oracle's forms
    """The sum of the squares of the terms that attention adds up."""
    return oracle.attend(query, key, unit_values(value), under).square() @ for_heads(value.square(), query)


def consistent(trial: Trial) -> str:
    """Output and gradients are those of one and the same draw."""
    case = trial.case()
    for _ in range(MOST_DRAWS):  # a draw that leaves something
        with torch.enable_grad():
            output = case.output()
        seen = weights_in(output.detach(), trial.workload)
        if (seen.abs() > trial.off)[trial.told].any():
            break
    of_small = (seen / trial.weights).nan_to_num(0.0).clamp(0.0, trial.rescale)
    keep = ((seen.abs() > trial.off).double() * trial.rescale).where(trial.told, of_small)

    def dropping(form: oracle.Form) -> oracle.Form:
        def dropped(query: Tensor, key: Tensor, value: Tensor, under: Any) -> Tensor:  # noqa: ANN401 - likewise
            weights = form(query, key, unit_values(value), under) * keep.to(query)
            return weights @ for_heads(value, query)

        return dropped

    plain = msgspec.structs.replace(trial.workload, dropout=0.0)
    reference = refer_to(plain, unit_inputs(plain, trial.seed), trial.seed, change=dropping)
    found = {"output": output.detach()} | gradients(case, output, reference)
    wrong = [each for each in errors(found, reference) if not each.agrees]
    if not wrong:
        return ""
    names = ", ".join(each.tensor for each in wrong)
    return f"the backward pass is not that of the weights which the forward pass dropped: {names}"


def chance(counts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.float64]:
    """The chance of each binomial count to be as far out as it is, on either side."""
    from scipy.special import bdtr, bdtrc  # a worker that checks no dropout does without

    below, above = bdtr(counts.astype(float), sizes, share), bdtrc(counts.astype(float) - 1, sizes, share)
    return np.asarray(np.minimum(1.0, 2 * np.minimum(below, above)), dtype=np.float64)


RULES: dict[str, Callable[[Trial], str]] = {
    "dropout rescales": rescaled,
    "dropout of weights": of_weights,
    "dropout drawn anew": drawn_anew,
    "dropout share": share,
    "dropout independent": independent,
    "dropout mean": mean,
    "dropout gradients": consistent,
}


def examine(implementation: Implementation, workload: Workload, seed: int) -> tuple[RuleResult, ...]:
    """Try the rules up to the first that does not hold; what a candidate raises is what was found."""
    results: list[RuleResult] = []
    trial = Trial(implementation, workload, seed)
    here = device(workload.device)
    forked = [] if here.is_host else [torch.device(here.torch_device)]  # the host's own generator always is
    with torch.random.fork_rng(forked, device_type=here.torch_device.partition(":")[0]):
        torch.manual_seed(seed)
        for name, rule in RULES.items():
            try:
                found = rule(trial)
            except Exception as error:  # noqa: BLE001 - whatever the candidate raises
                found = f"dropout cannot be checked: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            results.append(RuleResult(rule=name, holds=not found, found=found))
            if found:
                break
    return tuple(results)


def still_drops(case: Case) -> str:
    """What is wrong with what a case drops that is being timed, in words, or "".

    Where it can be done, in scope `attention`, all values become 1 for two calls: a row's output is then the sum of its
    weights, whose mean over n independent rows is 1 within Hoeffding's bound, at any length.
    """
    workload = case.workload
    kept = case.tensors["value"].detach().clone() if workload.scope == "attention" else None
    try:
        if kept is not None:
            fill(case.tensors["value"], torch.ones_like(kept))
        with torch.no_grad():
            one, other = case.output(), case.output()
    finally:
        if kept is not None:
            fill(case.tensors["value"], kept)
    p = workload.dropout
    empty = case.mask.empty
    num_rows = workload.num_heads * workload.batch_size * workload.seq_len
    if empty is not None:
        num_rows = workload.num_heads * int((~empty).sum())
    if torch.equal(one, other) and num_rows * math.log(p**2 + (1 - p) ** 2) < math.log(FALSE_ALARM):
        return "two calls drop the same, or nothing"
    if kept is None:
        return ""
    rows = one.double()[..., 0]  # (B,H,T,V) -> (B,H,T)
    found = float(rows.sum()) / num_rows  # who sees no key adds 0
    reach = (math.log(2 / FALSE_ALARM) / (2 * num_rows)) ** 0.5 / (1 - p)
    reach += 4 * torch.finfo(one.dtype).eps / (1 - p)
    return (
        "" if abs(found - 1) <= reach else f"the weights add up to {found:.4g} in the mean, not to 1 within {reach:.2g}"
    )
