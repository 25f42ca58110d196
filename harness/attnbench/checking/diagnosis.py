"""What is wrong with a candidate that disagrees, in words: the nearest known mistake, the first step that differs.

The candidate's answers are compared with those of every mistake of the catalogue, by the rule of the check itself. Two
mistakes with the same answers at this workload are both named. Where no mistake explains the answers, the diagnosis
describes the weights that the candidate uses: which keys have weight, whether a query's weights add up to 1.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Iterable

import msgspec
import torch
from torch import Tensor

from attnbench.checking import oracle
from attnbench.checking.case import build
from attnbench.checking.mistakes import Mistake, catalogue
from attnbench.checking.reference import (
    Reference,
    answers,
    differences,
    largest,
    observe,
    reference_for_probe,
    rounding_band,
    scales_of,
)
from attnbench.contract import Implementation
from attnbench.storage.records import Agreement

SHORT_LEN = 67
MOST_SCORES = 2**20
"""Up to this many scores a failing workload is diagnosed as it is; else at SHORT_LEN, where it fails there too."""
SHORTLIST = 16
MATCH = 4.0
"""A mistake explains a tensor that is within this many tolerances of the mistake's own answer."""
ROUNDING_SPAN = 8.0
RULE_MISTAKES = {
    "inputs kept": "input_changed",
    "outputs apart": "stale_output_buffer",
    "layouts": "read_as_contiguous",
}
UNKNOWN = "No known mistake explains it."
SMALL_WEIGHT = 1e-3
"""The ratio to a right weight below this says nothing."""
CLOSE = 0.05
WEIGHT_ROUNDINGS = 16
"""Weights that are off by no more than this many roundings are right."""


class Evidence:
    """What a candidate answered to one probe."""

    def __init__(self, implementation: Implementation, reference: Reference) -> None:
        """Ask the candidate; what it raises passes through."""
        given = observe(implementation, reference)
        self.reference = reference
        self.observed = {name: tensor.detach().double().cpu() for name, tensor in given.items()}
        is_finite = bool(self.observed["output"].isfinite().all())
        self.own_dtype = reference.inputs.weights.query.dtype
        # Where something overflowed, mistakes answer in the candidate's dtype; NaN spreads to gradients.
        self.dtype = torch.float64 if is_finite else self.own_dtype
        self.names = [name for name in self.observed if name in reference.expected] if is_finite else ["output"]

    def is_wrong(self, name: str) -> bool:
        """Whether that tensor's error exceeds its tolerance."""
        error = largest(self.observed[name], self.reference.expected[name])
        return not error <= self.reference.tolerance(name)


def explain(
    implementation: Implementation,
    references: dict[str, Reference],
    wrong: Agreement,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
) -> Agreement:
    """The agreement of a candidate that disagrees with its diagnosis; what it raises when called again passes through.

    `on_step` is called before each known mistake is tried: all of them together may take long.
    """

    def diagnosed(words: str, mistakes: tuple[str, ...] = (), step: str = "") -> Agreement:
        return msgspec.structs.replace(wrong, diagnosis=words, mistakes=mistakes, step=step)

    if wrong.broken_rules and all(tensor.agrees for _, tensor in wrong.tensors()):
        rule = wrong.broken_rules[0]
        known = RULE_MISTAKES.get(rule.rule)
        return diagnosed(f"{rule.found} (rule: {rule.rule})", (known,) if known else ())
    place = describe(wrong)
    evidence = gather(implementation, references, seed)
    matches = match(evidence, on_step)
    if matches:
        first, *others = matches
        words = f"It looks as if {first.words}."
        also = dict.fromkeys(each.words for each in others if each.name != first.name)
        words += f" On this workload that cannot be distinguished from: {'; '.join(also)}." if also else ""
        step = first.step
        where = f"the backward pass of {step}" if first.is_gradient else step
        names = tuple(dict.fromkeys(each.name for each in matches))
        return diagnosed(f"{words} First step that differs: {where}. {place}", names, step)
    factor = _factor(evidence)
    if factor is not None:
        return diagnosed(f"The output is {factor:.6g} times what it should be. {place}", step="output")
    words, names, step = UNKNOWN, (), ""
    reference = evidence[0].reference
    if not any(each.is_wrong("output") for each in evidence):
        words, step = "No known mistake explains it; the output is right, the backward pass is not.", "backward pass"
    elif reference.workload.scope == "attention" and len(reference.rows) == reference.workload.seq_len:
        forward = msgspec.structs.replace(reference.workload, direction="inference")
        with contextlib.suppress(Exception):  # a candidate may fail on unit vectors
            words, names, step = describe_weights(implementation, reference_for_probe(forward, "normal", 0))
    random = next((rule for rule in wrong.notes if rule.rule == "repeatable"), None)
    if random is not None and not names:
        words = f"Is dropout, or something else random, active in evaluation? On equal inputs {random.found}."
        names = ("dropout_in_evaluation", "dropout_without_rescaling")
        step = "weights"
    return diagnosed(f"{words} {place}", names, step)


def gather(implementation: Implementation, references: dict[str, Reference], seed: int) -> list[Evidence]:
    """The candidate's answers; at a short length, where more can be recognised, if it is wrong there too."""
    given = [Evidence(implementation, reference) for reference in references.values()]
    workload = next(iter(references.values())).workload
    num_scores = workload.batch_size * workload.num_heads * workload.seq_len * workload.kv_len
    if num_scores <= MOST_SCORES:
        return given
    short = workload.at_length(min(SHORT_LEN, workload.seq_len))
    try:
        at_short = [Evidence(implementation, reference_for_probe(short, probe, seed)) for probe in references]
    except Exception:  # noqa: BLE001 - the candidate may not support this length
        return given
    return at_short if any(each.is_wrong(name) for each in at_short for name in each.names) else given


def match(evidence: list[Evidence], on_step: Callable[[], object] = lambda: None) -> list[Mistake]:
    """The mistakes that explain everything, the best first; those that are no worse than it by much are as likely."""
    workload = evidence[0].reference.workload
    has_all_rows = len(evidence[0].reference.rows) == workload.seq_len
    known = [
        each
        for each in catalogue(workload)
        if not (each.is_random or each.is_memory) and (has_all_rows or not each.needs_all_rows)
    ]
    is_output_wrong = any(each.is_wrong("output") for each in evidence)
    possible = [each for each in known if each.is_gradient is not is_output_wrong]
    near = sorted(possible, key=lambda each: _distance(each, evidence, on_step, is_output_only=True))[: 2 * SHORTLIST]
    near = sorted(near, key=lambda each: _distance(each, evidence, on_step, is_output_only=False))[:SHORTLIST]
    ratios = sorted(((_error_ratio(each, evidence), each) for each in near), key=operator.itemgetter(0))
    limit = min(MATCH, max(1.0, 2 * ratios[0][0])) if ratios else MATCH
    matches = [each for ratio, each in ratios if ratio <= limit]
    return matches if matches or _factor(evidence) is not None else _by_rounding(known, evidence)


def _distance(
    mistake: Mistake, evidence: list[Evidence], on_step: Callable[[], object], *, is_output_only: bool
) -> tuple[float, float]:
    """How far the candidate is from the mistake beyond the tolerance, as a share of the tensors' size: the worst.

    Second comes the sum of the distances without regard to the tolerance, to order what is near.
    """
    on_step()
    worst, total = 0.0, 0.0
    for each in evidence:
        made = _answers(mistake, each.reference, each.dtype, with_gradients=not is_output_only)
        compared = ["output"] if is_output_only else [name for name in each.names if name in made]
        scales = scales_of({name: made[name].nan_to_num() for name in compared})
        for name in compared:
            apart, scale = _apart(each.observed[name], made[name]), scales[name] or 1.0
            worst = max(worst, (apart - each.reference.tolerance(name)) / scale)
            total += apart / scale
    return worst, total


def _error_ratio(mistake: Mistake, evidence: list[Evidence]) -> float:
    """The largest error against the mistake's answers, as a share of the tolerance for them.

    A mistake that changes nothing here explains nothing.
    """
    worst, is_idle = 0.0, True
    for each in evidence:
        exact = _answers(mistake, each.reference, each.dtype)
        own = _answers(mistake, each.reference, each.own_dtype)
        scales = scales_of({name: tensor.nan_to_num() for name, tensor in exact.items()})
        for name in each.names:
            tolerance = each.reference.tolerance(name)
            band = rounding_band(exact[name].nan_to_num(), scales[name], each.reference.workload, 0.0)
            is_idle &= largest(exact[name], each.reference.expected[name]) <= tolerance
            limit = 2 * _apart(own[name], exact[name]) + band + tolerance
            apart = min(_apart(each.observed[name], exact[name]), _apart(each.observed[name], own[name]))
            worst = max(worst, apart / limit if limit else float(apart > 0) * math.inf)
    return math.inf if is_idle else worst


def _answers(
    mistake: Mistake, reference: Reference, dtype: torch.dtype, *, with_gradients: bool = True
) -> dict[str, Tensor]:
    """What the mistake answers in that dtype, in float64."""
    inputs = reference.drawn.map(lambda tensor: tensor.to(dtype))
    ask = mistake.answer(reference.workload, reference.rows)
    if not with_gradients:
        with torch.no_grad():
            return {"output": ask(inputs).double()}
    made = answers(reference.workload, inputs, reference.grad_rows.to(dtype), ask)
    return {name: tensor.double() for name, tensor in made.items()}


def _apart(candidate: Tensor, mistaken: Tensor) -> float:
    """The largest difference; where the mistake gives NaN, so must the candidate, and an empty row may be 0 or NaN."""
    broken = ~mistaken.isfinite()
    if (candidate.isfinite() & broken).any():
        return math.inf
    empty = (mistaken == 0).all(dim=-1, keepdim=True) & candidate.isnan().all(dim=-1, keepdim=True)
    distance = (candidate - mistaken).abs().masked_fill(broken | empty, 0.0)
    return math.inf if distance.isnan().any() else float(distance.max())


def _by_rounding(known: Iterable[Mistake], evidence: list[Evidence]) -> list[Mistake]:
    """The mistakes of rounding whose error of the output is as large as the candidate's on every probe, if any."""
    matches = []
    for mistake in known:
        ratios = []
        for each in evidence if mistake.is_rounding else ():
            if each.is_wrong("output"):
                expected = each.reference.expected["output"]
                mistaken = _answers(mistake, each.reference, each.own_dtype)["output"]
                error, error_of_mistake = largest(each.observed["output"], expected), largest(mistaken, expected)
                ratios.append(error / error_of_mistake if error_of_mistake and error < math.inf else math.inf)
        if ratios and all(1 / ROUNDING_SPAN <= ratio <= ROUNDING_SPAN for ratio in ratios):
            matches.append((max(*ratios, 1 / min(ratios)), mistake))
    return [mistake for _, mistake in sorted(matches, key=operator.itemgetter(0))]


def _factor(evidence: list[Evidence]) -> float | None:
    """The number that the output is multiplied by, the same on every probe; None where that is not what is wrong."""
    factors = []
    for each in evidence:
        output, expected = each.observed["output"], each.reference.expected["output"]
        if not output.isfinite().all():
            return None
        factor = float((output * expected).sum() / expected.square().sum())
        if largest(output, factor * expected) > MATCH * each.reference.tolerance("output"):
            return None
        factors.append(factor)
    spread = max(factors) - min(factors)
    return factors[0] if spread <= 0.1 * abs(factors[0] - 1) else None


def recover_weights(attend: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The weights (B, H, T, S) that `attend` uses, which maps values (B, G, S, V) to a context (B, H, T, V).

    Attention is linear in its values: where column j of the values is 1 at one key and 0 elsewhere, column j of the
    context is the weight of that key. As many keys are asked about at a time as there are columns in `like`.
    """
    key_len, width = like.shape[-2:]
    columns = []
    for start in range(0, key_len, width):
        count = min(width, key_len - start)
        unit = torch.zeros_like(like)
        unit[:, :, torch.arange(start, start + count), torch.arange(count)] = 1.0
        columns.append(attend(unit)[..., :count])
    return torch.cat(columns, dim=-1)


def describe_weights(implementation: Implementation, reference: Reference) -> tuple[str, tuple[str, ...], str]:
    """What the candidate's weights (B, H, T, S) show, which mistakes that could be, and the first step that differs.

    `reference` has scope `attention` and all query rows.
    """
    workload, inputs = reference.workload, reference.inputs

    def attend(value: Tensor) -> Tensor:
        case = build(workload, implementation, inputs.map(lambda tensor: tensor.clone()))
        case.tensors["value"] = value
        with torch.no_grad():
            return case.output()

    mask = oracle.row_mask(workload, torch.arange(workload.seq_len))
    right = oracle.weights(reference.drawn.tensors["query"], reference.drawn.tensors["key"], mask)
    actual = recover_weights(attend, inputs.tensors["value"]).double().cpu()
    ratio = (actual / right)[right > SMALL_WEIGHT]
    dropped = ratio.abs() < CLOSE
    kept, share = ratio[~dropped], float(dropped.double().mean())
    if 0 < share < 1 and len(kept) and not float((kept / kept.median() - 1).abs().max()) > CLOSE:
        factor = float(kept.median())
        is_rescaled = abs(factor - 1) > CLOSE / 2
        name = "dropout_in_evaluation" if is_rescaled else "dropout_without_rescaling"
        also = f"the others multiplied by {factor:.2f}" if is_rescaled else "the others as they were, without rescaling"
        words = f"It looks as if dropout is active in evaluation: {share:.0%} of the weights are 0, {also}."
        return f"{words} First step that differs: weights.", (name,), "weights"
    apart, place = differences(actual, right)
    if float(apart.max()) <= WEIGHT_ROUNDINGS * torch.finfo(inputs.weights.query.dtype).eps:
        return "No known mistake explains it; its weights, seen from outside, are right.", (), "context"
    batch, head, query, key = place
    worst, expected = float(actual[place]), float(right[place])
    facts = [
        f"query {query} gives key {key} {worst:.3g} where {expected:.3g} is right (batch row {batch}, head {head})"
    ]
    sums = actual.sum(dim=-1)
    low, high = float(sums.min()), float(sums.max())
    if max(abs(low - 1), abs(high - 1)) > CLOSE:
        facts.append(f"a query's weights add up to {low:.3g} to {high:.3g}, not 1")
    leaked = float(actual.where(~mask.seen, 0.0).abs().max())
    if leaked > SMALL_WEIGHT:
        facts.append(f"hidden keys get up to {leaked:.3g}")
    return f"{UNKNOWN} Its weights, seen from outside: {'; '.join(facts)}.", (), "weights"


def describe(agreement: Agreement) -> str:
    """Where the output, or else a gradient, is worst, by how much, and which probes show it."""
    wrong = [(probe, tensor) for probe, tensor in agreement.tensors() if not tensor.agrees]
    ratios = [each.error / each.allowed if each.error is not None and each.allowed else math.inf for _, each in wrong]
    probe, worst = max(zip(wrong, ratios, strict=True), key=lambda item: (item[0][1].tensor == "output", item[1]))[0]
    place = ", ".join(map(str, worst.worst))
    actual = "not finite" if worst.actual is None else f"{worst.actual:.6g}"
    value = f"at [{place}] it is {actual}, the oracle says {worst.expected:.6g}"
    size = "not finite" if worst.error is None else f"{worst.error:.3g}"
    others = sorted({tensor.tensor for _, tensor in wrong} - {worst.tensor})
    also = f"; also wrong: {', '.join(others)}" if others else ""
    finders = dict.fromkeys(name for name, _ in wrong)
    blind = [each.probe for each in agreement.probes if each.probe not in finders]
    by = f"; found by: {', '.join(finders)}" + (f", not by {', '.join(blind)}" if blind else "")
    return f"{worst.tensor} is wrong on {probe} inputs: {value} (error {size}, tolerance {worst.allowed:.3g}){also}{by}"
