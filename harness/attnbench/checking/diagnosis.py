"""What is wrong with a candidate that disagrees, in words: the nearest known mistake, the first step that differs.

The candidate's answers are held against those of every mistake of the catalogue, by the rule of the check itself. Two
mistakes whose answers are the same here are both named. What no mistake explains is told by what it does: which keys
have weight, whether its weights add up to 1.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from attnbench.checking import mistaken, reveal
from attnbench.checking.deviation import allowed, observe
from attnbench.checking.mistakes import Planted, catalogue
from attnbench.checking.reference import Reference, answers, largest, refer, rounding_band, scales_of
from attnbench.contract import Implementation
from attnbench.storage.records import Agreement, TensorError
from attnbench.timing.prediction import at_length

SHORT_LEN = 67
MOST_SCORES = 2**20
"""Up to this many scores a failing workload is diagnosed as it is; else at SHORT_LEN, where it fails there too."""
SHORTLIST = 16
MATCH = 4.0
"""A mistake explains a tensor that is within this many times what is allowed of the mistake's own answer."""
ROUNDING_SPAN = 8.0
FACTOR_SPREAD = 0.1
RANDOM_MISTAKES = ("dropout_in_evaluation", "dropout_without_rescaling")
RULE_MISTAKES = {
    "inputs kept": "input_changed",
    "outputs apart": "stale_output_buffer",
    "layouts": "read_as_contiguous",
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The words, the mistakes that it could be, the first step that differs ("" where it is not known)."""

    words: str
    mistakes: tuple[str, ...] = ()
    step: str = ""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a candidate answered to some probes."""

    reference: Reference
    found: dict[str, Tensor]  # float64 on the CPU

    def is_wrong(self, name: str) -> bool:
        """Whether that tensor is further off than it may be."""
        return not largest(self.found[name], self.reference.expected[name]) <= allowed(name, self.reference)

    @property
    def dtype(self) -> torch.dtype:
        """In what dtype a mistake answers: in float64, but where something overflowed, in the candidate's own."""
        is_finite = bool(self.found["output"].isfinite().all())
        return torch.float64 if is_finite else self.reference.inputs.weights.query.dtype

    @property
    def names(self) -> list[str]:
        """The compared tensors; where the output is not finite, the output alone, since NaN spreads to gradients."""
        names = [name for name in self.found if name in self.reference.expected]
        return names if self.found["output"].isfinite().all() else ["output"]


@dataclass(frozen=True, kw_only=True)
class Match:
    """How well a mistake explains the evidence: the largest error over what is allowed."""

    planted: Planted
    error_ratio: float
    answers: tuple[dict[str, Tensor], ...]


def explain(
    implementation: Implementation,
    references: dict[str, Reference],
    wrong: Agreement,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
) -> Diagnosis:
    """The diagnosis of a candidate that disagrees; what it raises while being asked again passes through.

    `on_step` is called before each known mistake is tried: all of them together may take long.
    """
    if wrong.broken_rules and all(tensor.agrees for _, tensor in wrong.tensors()):
        rule = wrong.broken_rules[0]
        known = RULE_MISTAKES.get(rule.rule)
        return Diagnosis(words=f"{rule.found} (rule: {rule.rule})", mistakes=(known,) if known else ())
    place = describe(wrong)
    evidence = gather(implementation, references, seed)
    matches = match(evidence, on_step)
    if not matches:
        factor = _factor(evidence)
        if factor is not None:
            return Diagnosis(words=f"The output is {factor:.6g} times what it should be. {place}", step="output")
        guess = _by_its_weights(implementation, evidence)
        random = next((rule for rule in wrong.notes if rule.rule == "repeatable"), None)
        if random is not None and not guess.mistakes:
            words = f"Is dropout, or something else random, active in evaluation? On equal inputs {random.found}."
            return Diagnosis(words=f"{words} {place}", mistakes=RANDOM_MISTAKES, step="weights")
        return Diagnosis(words=f"{guess.words} {place}", mistakes=guess.mistakes, step=guess.step)
    first = matches[0].planted
    names = tuple(dict.fromkeys(found.planted.name for found in matches))
    step = first.mistake.step(first.changes)
    told = f"It looks as if {first.words}."
    others = [found.planted.words for found in matches[1:] if found.planted.name != first.name]
    if others:
        told += f" On this workload that cannot be told from: {'; '.join(dict.fromkeys(others))}."
    where = f"the backward pass of {step}" if first.mistake.is_gradient else step
    return Diagnosis(words=f"{told} First step that differs: {where}. {place}", mistakes=names, step=step)


def gather(implementation: Implementation, references: dict[str, Reference], seed: int) -> list[Evidence]:
    """The candidate's answers, at a short length where it is wrong there too, since more can be told from these."""
    given = [_ask(implementation, reference) for reference in references.values()]
    workload = next(iter(references.values())).workload
    num_scores = workload.batch_size * workload.num_heads * workload.seq_len * workload.kv_len
    if num_scores <= MOST_SCORES:
        return given
    short = at_length(workload, min(SHORT_LEN, workload.seq_len))
    try:
        at_short = [_ask(implementation, refer(short, probe, seed)) for probe in references]
    except Exception:  # noqa: BLE001 - this length may be none of its own
        return given
    return at_short if any(each.is_wrong(name) for each in at_short for name in each.names) else given


def _ask(implementation: Implementation, reference: Reference) -> Evidence:
    found = observe(implementation, reference)
    return Evidence(reference=reference, found={name: tensor.detach().double().cpu() for name, tensor in found.items()})


def match(evidence: list[Evidence], on_step: Callable[[], object] = lambda: None) -> list[Match]:
    """The mistakes that explain everything, the best first; those that are no worse than it by much are as likely."""

    def distance(each: Planted, names: tuple[str, ...] | None) -> tuple[float, float]:
        on_step()
        return _distance(each, evidence, names)

    workload = evidence[0].reference.workload
    has_all_rows = len(evidence[0].reference.rows) == workload.seq_len
    planted = [
        each
        for each in catalogue(workload)
        if not (each.mistake.is_random or each.mistake.is_memory) and (has_all_rows or not each.mistake.needs_all_rows)
    ]
    is_output_wrong = any(each.is_wrong("output") for each in evidence)
    possible = [each for each in planted if each.mistake.is_gradient is not is_output_wrong]
    near = sorted(possible, key=lambda each: distance(each, ("output",)))[: 2 * SHORTLIST]
    near = sorted(near, key=lambda each: distance(each, None))[:SHORTLIST]
    found = [made for each in near if (made := _match(each, evidence)).error_ratio <= MATCH]
    found.sort(key=lambda each: each.error_ratio)
    if not found and _factor(evidence) is None:
        return _by_rounding(planted, evidence)
    return [each for each in found if each.error_ratio <= max(1.0, 2 * found[0].error_ratio)]


def _distance(planted: Planted, evidence: list[Evidence], names: tuple[str, ...] | None) -> tuple[float, float]:
    """How far the candidate is from the mistake, past what is allowed, as a share of the tensors' size: the worst.

    Of those tensors alone, or of all. Second comes the same without regard to what is allowed, to order what is near.
    """
    worst, plain = 0.0, 0.0
    for each in evidence:
        told = _answers(planted, each.reference, each.dtype, with_gradients=names is None)
        compared = [name for name in names or each.names if name in told]
        scales = scales_of({name: told[name].nan_to_num() for name in compared})
        for name in compared:
            off, scale = _off(each.found[name], told[name]), scales[name] or 1.0
            worst = max(worst, (off - allowed(name, each.reference)) / scale)
            plain += off / scale
    return worst, plain


def _match(planted: Planted, evidence: list[Evidence]) -> Match:
    """The largest error against the mistake's answers, as a share of what is allowed for them.

    A mistake that changes nothing here explains nothing.
    """
    worst, told, is_idle = 0.0, [], True
    for each in evidence:
        exact = _answers(planted, each.reference, each.dtype)
        own = _answers(planted, each.reference, each.reference.inputs.weights.query.dtype)
        scales = scales_of({name: tensor.nan_to_num() for name, tensor in exact.items()})
        for name in each.names:
            band = rounding_band(exact[name].nan_to_num(), scales[name], each.reference.workload, 0.0)
            is_idle &= largest(exact[name], each.reference.expected[name]) <= allowed(name, each.reference)
            limit = 2 * _off(own[name], exact[name]) + band + allowed(name, each.reference)
            off = min(_off(each.found[name], exact[name]), _off(each.found[name], own[name]))
            worst = max(worst, off / limit if limit else float(off > 0) * math.inf)
        told.append(exact)
    return Match(planted=planted, error_ratio=math.inf if is_idle else worst, answers=tuple(told))


def _answers(
    planted: Planted, reference: Reference, dtype: torch.dtype, *, with_gradients: bool = True
) -> dict[str, Tensor]:
    inputs = reference.drawn.map(lambda tensor: tensor.to(dtype))
    ask = mistaken.answer(reference.workload, planted, reference.rows)
    if not with_gradients:
        with torch.no_grad():
            return {"output": ask(inputs).double()}
    made = answers(reference.workload, inputs, reference.grad_rows.to(dtype), ask)
    return {name: tensor.double() for name, tensor in made.items()}


def _off(candidate: Tensor, told: Tensor) -> float:
    """The largest difference; a mistake's NaN asks for what is not finite, and an empty row may be 0 or NaN."""
    broken = ~told.isfinite()
    if (candidate.isfinite() & broken).any():
        return math.inf
    empty = (told == 0).all(dim=-1, keepdim=True) & candidate.isnan().all(dim=-1, keepdim=True)
    distance = (candidate - told).abs().masked_fill(broken | empty, 0.0)
    return math.inf if distance.isnan().any() else float(distance.max())


def _by_rounding(planted: Iterable[Planted], evidence: list[Evidence]) -> list[Match]:
    """The mistakes of rounding whose error is as large as the candidate's on every probe, if any."""
    found = []
    for each in planted:
        ratios = list(_rounding_ratios(each, evidence)) if each.mistake.is_rounding else []
        if ratios and all(1 / ROUNDING_SPAN <= ratio <= ROUNDING_SPAN for ratio in ratios):
            found.append(Match(planted=each, error_ratio=max(*ratios, 1 / min(ratios)), answers=()))
    return sorted(found, key=lambda match: match.error_ratio)


def _rounding_ratios(planted: Planted, evidence: list[Evidence]) -> Iterator[float]:
    """The candidate's error of the output over the mistake's, on each probe."""
    for each in evidence:
        if each.is_wrong("output"):
            expected = each.reference.expected["output"]
            own = _answers(planted, each.reference, each.reference.inputs.weights.query.dtype)["output"]
            made, would = largest(each.found["output"], expected), largest(own, expected)
            yield made / would if would and made < math.inf else math.inf


def _factor(evidence: list[Evidence]) -> float | None:
    """The number that the output is multiplied by, the same on every probe; None where that is not what is wrong."""
    factors = []
    for each in evidence:
        found, expected = each.found["output"], each.reference.expected["output"]
        if not found.isfinite().all():
            return None
        factor = float((found * expected).sum() / expected.square().sum())
        if largest(found, factor * expected) > MATCH * allowed("output", each.reference):
            return None
        factors.append(factor)
    spread = max(factors) - min(factors)
    return factors[0] if spread <= abs(factors[0] - 1) * FACTOR_SPREAD else None


def _by_its_weights(implementation: Implementation, evidence: list[Evidence]) -> Diagnosis:
    """No known mistake: what the weights look like from outside, where they can be seen."""
    reference = evidence[0].reference
    if not any(each.is_wrong("output") for each in evidence):
        words = "No known mistake explains it; the output is right, the backward pass is not."
        return Diagnosis(words=words, step="backward pass")
    if reference.workload.scope == "module" or len(reference.rows) < reference.workload.seq_len:
        return Diagnosis(words="No known mistake explains it.")
    forward = msgspec.structs.replace(reference.workload, direction="inference")
    try:
        words, mistakes, step = reveal.describe(implementation, refer(forward, "normal", 0))
    except Exception:  # noqa: BLE001 - a candidate need not stand being looked at
        return Diagnosis(words="No known mistake explains it.")
    return Diagnosis(words=words, mistakes=mistakes, step=step)


def describe(agreement: Agreement) -> str:
    """Where the output, or else a gradient, is worst, by how much, and which probes found it."""
    wrong = [(probe, tensor) for probe, tensor in agreement.tensors() if not tensor.agrees]
    probe, worst = max(wrong, key=lambda item: (item[1].tensor == "output", severity(item[1])))
    place = ", ".join(map(str, worst.worst))
    actual = "not finite" if worst.actual is None else f"{worst.actual:.6g}"
    value = f"at [{place}] it is {actual}, the oracle says {worst.expected:.6g}"
    size = "not finite" if worst.error is None else f"{worst.error:.3g}"
    others = sorted({tensor.tensor for _, tensor in wrong} - {worst.tensor})
    also = f"; also wrong: {', '.join(others)}" if others else ""
    finders = dict.fromkeys(name for name, _ in wrong)
    blind = [each.probe for each in agreement.probes if each.probe not in finders]
    by = f"; found by: {', '.join(finders)}" + (f", not by {', '.join(blind)}" if blind else "")
    return f"{worst.tensor} is wrong on {probe} inputs: {value} (error {size}, allowed {worst.allowed:.3g}){also}{by}"


def severity(tensor: TensorError) -> float:
    """How many times what is allowed."""
    if tensor.error is None:
        return math.inf
    return tensor.error / tensor.allowed if tensor.allowed else math.inf
