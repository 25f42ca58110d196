"""What is wrong with a candidate that disagrees, in words: the nearest known mistake, the first step that differs.

The candidate's answers are compared with those of every mistake of the catalogue, by the rule of the check itself. Two
mistakes with the same answers at this workload are both named. Where no mistake explains the answers, the diagnosis
describes the weights that the candidate uses: which keys have weight, whether a query's weights add up to 1.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from attnbench.checking import oracle
from attnbench.checking.case import build, stored
from attnbench.checking.mistakes import ALL, Mistake, catalogue
from attnbench.checking.reference import (
    Reference,
    answers,
    differences,
    largest,
    observe,
    reference_for_probe,
    roundings,
)
from attnbench.checking.steps import Textbook
from attnbench.contract import Implementation
from attnbench.storage.records import Agreement
from attnbench.workloads.workload import Workload

SHORT_LEN = 67
MOST_HEADS = 4
MOST_ROWS = 2
MOST_SCORES = 2**16
"""Up to this many scores a failing workload is diagnosed as it is; else at a short one, where it fails there too."""
SHORTLIST = 32
MATCH = 4.0
"""A mistake explains a tensor that is within this many tolerances of the mistake's own answer."""
LEAST_ROWS = 8
EXPLAINED = 0.9
"""A fitted number explains an error if what is left of its squares is at most 1 minus this."""
ROUNDING_EXPLAINED = 0.38
"""Roundings to bfloat16 explain an error if this share of its squares is theirs: noise has next to none ..."""
ROUNDING_CORRELATION = 0.36
"""... and if one of them correlates with it this well."""
LEAST_VALUES = 64
"""Of fewer values, a few roundings explain so much of any noise by chance."""
LEAST_SHARE = 0.03
"""A further rounding is named if it explains this share more."""
ROUNDING_SPAN = 8.0
"""Errors of roundings are at most this many times as large as what is computed here: sums in another order are."""
SMALLEST = torch.finfo(torch.float64).tiny
MOST_FITS = 10
MOST_TIMES = 1e3
"""A fitted number is no larger than this."""
RULE_MISTAKES = {
    "inputs kept": "input_changed",
    "outputs apart": "stale_output_buffer",
    "layouts": "read_as_contiguous",
}
KEPT = "outputs apart"
"""Whoever breaks this rule may be wrong for no other reason: it answers from an earlier call."""
UNKNOWN = "No known mistake explains it."
RANDOM = {mistake.name for mistake in ALL if mistake.is_random}
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
        """Whether that tensor's errors exceed their limits."""
        return not self.reference.tolerances[name].judge(self.observed[name]).agrees

    @property
    def has_all_rows(self) -> bool:
        """Whether every query row is compared."""
        return len(self.reference.rows) == self.reference.workload.seq_len

    @property
    def has_more(self) -> bool:
        """Whether there is more than the output at the rows that distinguish mistakes."""
        return len(self.names) > 1 or len(self.places()) < len(self.reference.rows)

    def places(self) -> Tensor:
        """Which of the compared rows (R,) distinguish mistakes: all, or of many scores the worst, and some.

        Counted from 0 to R - 1.
        """
        workload, num_rows = self.reference.workload, len(self.reference.rows)
        scores_of_row = workload.batch_size * workload.num_heads * workload.kv_len
        most = max(LEAST_ROWS, MOST_SCORES // scores_of_row)
        if num_rows <= most:
            return torch.arange(num_rows)
        apart, _ = differences(self.observed["output"], self.reference.expected["output"])
        by_row = apart.movedim(-2, 0).flatten(1).amax(dim=1)  # (R,)
        spread = torch.linspace(0, num_rows - 1, most // 2).long()
        worst = by_row.topk(most - most // 2).indices
        chosen: Tensor = torch.cat([worst, spread]).unique()  # in order
        return chosen


class Outputs:
    """The outputs of mistakes for one probe, at the rows that distinguish them, in one dtype, with shared steps."""

    def __init__(self, evidence: Evidence, places: Tensor, dtype: torch.dtype) -> None:
        """Compute the right steps, from which each mistake goes on."""
        reference = evidence.reference
        self.workload, self.rows = reference.workload, reference.rows[places]
        self.inputs = reference.drawn.map(lambda tensor: tensor.to(dtype))

    @cached_property
    def chosen(self) -> Textbook:
        """The right steps at the chosen rows."""
        return Textbook(self.workload, self.inputs, self.rows)

    @cached_property
    def whole(self) -> Textbook:
        """The right steps at every row."""
        is_all = len(self.rows) == self.workload.seq_len
        return self.chosen if is_all else Textbook(self.workload, self.inputs, torch.arange(self.workload.seq_len))

    @torch.no_grad()
    def __call__(self, mistake: Mistake) -> Tensor:
        """The output at the chosen rows in float64: (B, H, R, V), or (B, R, D) in scope `module`."""
        made: Tensor = (self.whole if mistake.needs_all_rows else self.chosen).output(mistake.changes).double()
        is_cut = mistake.needs_all_rows and self.whole is not self.chosen
        return made.index_select(made.dim() - 2, self.rows) if is_cut else made


def explain(  # noqa: PLR0913 - the last two have defaults that serve
    implementation: Implementation,
    references: dict[str, Reference],
    wrong: Agreement,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
    *,
    earlier: Sequence[Agreement] = (),
) -> Agreement:
    """The agreement of a candidate that disagrees with its diagnosis; what it raises when called again passes through.

    `on_step` is called before each known mistake is tried: all of them together may take long. `earlier` are diagnoses
    of the same candidate at other workloads: a mistake that one of them named is tried first, and where it explains
    this failure too no other is. If none explained a failure with the same symptoms, or that one was random, none is
    tried.
    """

    def diagnosed(words: str, mistakes: tuple[str, ...] = (), step: str = "") -> Agreement:
        return msgspec.structs.replace(wrong, diagnosis=words, mistakes=mistakes, step=step)

    if wrong.broken_rules and all(tensor.agrees for _, tensor in wrong.tensors()):
        rule = wrong.broken_rules[0]
        known = RULE_MISTAKES.get(rule.rule)
        return diagnosed(f"{rule.found} (rule: {rule.rule})", (known,) if known else ())
    place = describe(wrong)
    evidence = gather(implementation, references, seed)
    before = {name for each in earlier for name in each.mistakes} - RANDOM
    alike = [set(each.mistakes) for each in earlier if each.diagnosis and symptoms(each) == symptoms(wrong)]
    matches = match(evidence, on_step, before) if before else []
    if not matches and set() in alike:
        return diagnosed(f"{UNKNOWN} The failure looks like an earlier one. {place}")
    if not matches and not any(names <= RANDOM for names in alike):
        matches = match(evidence, on_step)
    if matches:
        first, *others = matches
        words = f"It looks as if {first.words}."
        also = dict.fromkeys(each.words for each in others if each.name != first.name or each.is_rounding)
        if also and first.is_rounding:  # these add up
            words += f" And as if {'; '.join(also)}."
        elif also:
            words += f" On this workload that cannot be distinguished from: {'; '.join(also)}."
        step = first.step
        where = f"the backward pass of {step}" if first.is_gradient else step
        names = tuple(dict.fromkeys(each.name for each in matches))
        return diagnosed(f"{words} First step that differs: {where}. {place}", names, step)
    random = next((rule for rule in wrong.notes if rule.rule == "repeatable"), None)
    words, names, step = UNKNOWN, (), ""
    reference = evidence[0].reference
    if not any(each.is_wrong("output") for each in evidence):
        words, step = "No known mistake explains it; the output is right, the backward pass is not.", "backward pass"
    elif reference.workload.scope == "attention" and len(reference.rows) == reference.workload.seq_len:
        forward = msgspec.structs.replace(reference.workload, direction="inference")
        with contextlib.suppress(Exception):  # a candidate may fail on unit vectors
            at_normal = reference_for_probe(forward, "normal", 0)
            words, names, step = describe_weights(implementation, at_normal, is_random=random is not None)
    if random is not None and not names and step != "weights":
        words = f"Is dropout, or something else random, active in evaluation? On equal inputs {random.found}."
        names = ("dropout_in_evaluation", "dropout_without_rescaling")
        step = "weights"
    elif random is not None and not names:
        words = f"Something random is active: on equal inputs {random.found}. {words}"
    if not names and (apart := [rule for rule in wrong.broken_rules if rule.rule == KEPT]):
        words = f"{apart[0].found[0].upper()}{apart[0].found[1:]} (rule: {KEPT}). {words}"
        names = (RULE_MISTAKES[KEPT],)
    return diagnosed(f"{words} {place}", names, step)


def symptoms(wrong: Agreement) -> tuple[frozenset[str], frozenset[str]]:
    """What a failure looks like from afar: the tensors that are wrong, and the rules that are broken."""
    tensors = frozenset(tensor.tensor for _, tensor in wrong.tensors() if not tensor.agrees)
    return tensors, frozenset(rule.rule for rule in wrong.broken_rules)


def gather(implementation: Implementation, references: dict[str, Reference], seed: int) -> list[Evidence]:
    """The candidate's answers; at a short length, where they are soon recognised, if it is wrong there too."""
    workload = next(iter(references.values())).workload
    num_scores = workload.batch_size * workload.num_heads * workload.seq_len * workload.kv_len
    for short in shorter(workload) if num_scores > MOST_SCORES else ():
        try:
            at_short = [Evidence(implementation, reference_for_probe(short, probe, seed)) for probe in references]
        except Exception:  # noqa: BLE001, S112 - the candidate may not support these sizes
            continue
        if any(each.is_wrong(name) for each in at_short for name in each.names):
            return at_short
    return [Evidence(implementation, reference) for reference in references.values()]


def shorter(workload: Workload) -> Iterator[Workload]:
    """The workload at a short length: with fewer heads and batch rows first, then with all of them."""
    short = workload.at_length(min(SHORT_LEN, workload.longest))
    group_size = workload.num_heads // workload.num_kv_heads
    groups = max(1, min(workload.num_kv_heads, MOST_HEADS // group_size))
    sizes = {"batch_size": min(MOST_ROWS, workload.batch_size), "num_kv_heads": groups}
    small = msgspec.structs.replace(short, **sizes, num_heads=groups * group_size)
    yield small
    if small != short:
        yield short


def match(
    evidence: list[Evidence], on_step: Callable[[], object] = lambda: None, names: Collection[str] = ()
) -> list[Mistake]:
    """The mistakes that explain everything, the best first; those that are no worse than it by much are as likely.

    Where `names` are given, only these are tried.
    """
    workload = evidence[0].reference.workload
    has_all_rows = all(each.has_all_rows for each in evidence)
    known = [
        each
        for each in catalogue(workload)
        if not (each.is_random or each.is_memory) and (has_all_rows or not each.needs_all_rows)
        if not names or each.name in names
    ]
    is_output_wrong = any(each.is_wrong("output") for each in evidence)
    exact = [each for each in known if not (each.is_fitted or each.is_rounding)]
    tried = [Tried(each) for each in exact if each.is_gradient is not is_output_wrong]
    # What is wrong on one probe is looked at first: it leaves few.
    for each in sorted(evidence, key=lambda each: not each.is_wrong("output")):
        tried = _left(tried, each, on_step)
    limit = MATCH
    for one in sorted(tried, key=lambda one: one.worst):  # the best first: it leaves few of the others
        for each in evidence:
            if one.worst <= limit and each.has_more:
                on_step()
                one.compare_all(each)
        limit = limit if one.is_idle else min(limit, max(1.0, 2 * one.worst))
    tried = [one for one in tried if one.worst <= limit]
    explaining = [one for one in tried if not one.is_idle]
    if is_output_wrong and not any(one.worst <= 1 for one in explaining):  # a number fits better than what hardly fits
        on_step()
        explaining += _fitted({each.name for each in known if each.is_fitted}, evidence)
    if explaining:
        explaining.sort(key=lambda one: one.worst)
        limit = min(MATCH, max(1.0, 2 * explaining[0].worst))
        return [one.mistake for one in explaining if one.worst <= limit]
    return _by_rounding([each for each in known if each.is_rounding], evidence) if is_output_wrong else []


class Tried:
    """A mistake, and how far the candidate is from it, as a share of the tolerance: the worst so far."""

    def __init__(self, mistake: Mistake) -> None:
        """Compare nothing yet."""
        self.mistake = mistake
        self.worst = 0.0
        self.is_idle = True  # it changes nothing here, and explains nothing

    def compare(self, each: Evidence, name: str, exact: Tensor, own: Tensor, places: Tensor | None = None) -> None:
        """Compare one tensor with the mistake's: as it is exactly, and in the candidate's dtype."""
        reference = each.reference
        expected, observed = reference.expected[name], each.observed[name]
        if places is not None:
            expected, observed = expected.index_select(-2, places), observed.index_select(-2, places)
        tolerance, scale = reference.tolerance(name), float(exact.nan_to_num().abs().max())
        band = scale * torch.finfo(each.own_dtype).eps / 2 * roundings(reference.workload, name, 0.0)
        self.is_idle &= largest(exact, expected) <= tolerance
        limit = 2 * _apart(own, exact) + band + tolerance
        apart = min(_apart(observed, exact), _apart(observed, own))
        self.worst = max(self.worst, apart / limit if limit else float(apart > 0) * math.inf)

    def compare_all(self, each: Evidence) -> None:
        """Compare every tensor, the output at every row."""
        exact = _answers(self.mistake, each.reference, each.dtype)
        own = _answers(self.mistake, each.reference, each.own_dtype)
        for name in each.names:
            self.compare(each, name, exact[name], own[name])


def _left(tried: list[Tried], each: Evidence, on_step: Callable[[], object]) -> list[Tried]:
    """The mistakes that explain the output on one probe, of those that are nearest to it beyond the tolerance."""
    places = each.places()
    exactly, own = Outputs(each, places, each.dtype), Outputs(each, places, each.own_dtype)
    observed, tolerance = each.observed["output"].index_select(-2, places), each.reference.tolerance("output")
    near = []
    for one in tried:
        on_step()
        made = exactly(one.mistake)
        scale = float(made.nan_to_num().abs().max()) or 1.0
        near.append(((_apart(observed, made) - tolerance) / scale, one, made))
    near.sort(key=operator.itemgetter(0))
    for _, one, made in near[:SHORTLIST]:
        on_step()
        one.compare(each, "output", made, made if each.dtype == each.own_dtype else own(one.mistake), places)
    return [one for _, one, _ in near[:SHORTLIST] if one.worst <= MATCH]


def _answers(mistake: Mistake, reference: Reference, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the mistake answers in that dtype, in float64."""
    inputs = reference.drawn.map(lambda tensor: tensor.to(dtype))
    ask = mistake.answer(reference.workload, reference.rows)
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


def _fitted(names: Collection[str], evidence: list[Evidence]) -> list[Tried]:
    """The mistakes with a free number that explain the outputs, with that number.

    The number is fitted where the output is wrong, and must do for every probe.
    """
    wrong = next(each for each in evidence if each.is_wrong("output"))
    if not all(each.observed["output"].isfinite().all() for each in evidence):
        return []
    outputs = [Outputs(each, each.places(), torch.float64) for each in evidence]
    own = [Outputs(each, each.places(), each.own_dtype) for each in evidence]
    found = []
    for mistake in ALL:
        if mistake.name not in names:
            continue
        number = _fit(mistake, wrong, outputs[evidence.index(wrong)])
        if number is None:
            continue
        fitted = Tried(mistake.with_choice(f"{number:.6g}", number))
        is_explained = True
        for each, exactly, rounded in zip(evidence, outputs, own, strict=True):
            places = each.places()
            made = exactly(fitted.mistake)
            fitted.compare(each, "output", made, rounded(fitted.mistake), places)
            observed = each.observed["output"].index_select(-2, places)
            right = each.reference.expected["output"].index_select(-2, places)
            is_better = (observed - made).square().sum() <= (1 - EXPLAINED) * (observed - right).square().sum()
            is_explained &= bool(is_better) or not each.is_wrong("output")
        if is_explained and fitted.worst <= MATCH and not fitted.is_idle:
            found.append(fitted)
    return found


def _fit(mistake: Mistake, evidence: Evidence, outputs: Outputs) -> float | None:
    """The number with which a mistake is nearest to the candidate's output, by Gauss and Newton; None where none is."""
    observed, number = evidence.observed["output"].index_select(-2, evidence.places()), 1.0
    for _ in range(MOST_FITS):
        size = max(1.0, abs(number))
        step = 1e-4 * size
        below, here, above = (outputs(mistake.with_choice("", each)) for each in (number - step, number, number + step))
        slope = (above - below) / (2 * step)
        moved = float(((observed - here) * slope).sum() / slope.square().sum())
        number += moved
        if not abs(number) <= MOST_TIMES:  # NaN included
            return None
        if abs(moved) <= 1e-7 * size:  # what float32 can resolve
            break
    return number


def _by_rounding(known: Sequence[Mistake], evidence: list[Evidence]) -> list[Mistake]:
    """The roundings whose errors add up to the candidate's, in the order of the steps; none if they do not.

    Many errors have the size of a rounding; only its own is large and small at the same places.
    """
    wrong = next(each for each in evidence if each.is_wrong("output"))
    if not known or not wrong.observed["output"].isfinite().all():
        return []
    places = wrong.places()
    outputs = Outputs(wrong, places, wrong.own_dtype)
    observed = wrong.observed["output"].index_select(-2, places)
    expected = wrong.reference.expected["output"].index_select(-2, places)
    error = (observed - expected).flatten()
    rounded = torch.stack([(outputs(mistake) - expected).flatten() for mistake in known], dim=-1)  # (n, mistakes)
    chosen, explained = _pursuit(rounded, error)
    sizes, size = rounded.norm(dim=0), float(error.norm())
    shares = (rounded.T @ error).abs() / (sizes * size).clamp(min=SMALLEST)
    is_enough = len(error) >= LEAST_VALUES and explained >= ROUNDING_EXPLAINED
    # A far larger error is alike by chance.
    is_of_size = size <= ROUNDING_SPAN * float(sizes[chosen].sum())
    if is_enough and is_of_size and float(shares.max()) >= ROUNDING_CORRELATION:
        return [known[place] for place in sorted(chosen)]
    is_small = size <= ROUNDING_SPAN * float(sizes.max())
    is_coarse = torch.equal(observed.bfloat16().double(), observed)
    if not (is_small and is_coarse) or torch.equal(expected.bfloat16().double(), expected):
        return []
    # In another order a sum makes other errors, but every result is a number that bfloat16 has.
    sums = [mistake for mistake in known if mistake.name == "bfloat16_sums"]
    return [replace(each, words="the sum over the keys is accumulated in bfloat16") for each in sums[:1]]


def _pursuit(columns: Tensor, target: Tensor) -> tuple[list[int], float]:
    """The columns (n, m) whose weighted sum explains most of the target (n,), one after another, and which share.

    Source: orthogonal matching pursuit, https://doi.org/10.1109/ACSSC.1993.342465.
    """
    chosen: list[int] = []
    rest, explained = target, 0.0
    while len(chosen) < columns.shape[1]:
        shares = (columns.T @ rest).abs() / columns.norm(dim=0).clamp(min=SMALLEST)
        shares[chosen] = 0.0
        tried = [*chosen, int(shares.argmax())]
        fit = torch.linalg.lstsq(columns[:, tried], target[:, None], driver="gelsd").solution
        rest = target - (columns[:, tried] @ fit)[:, 0]
        share = 1 - float(rest.square().sum() / target.square().sum())
        if share < explained + LEAST_SHARE:
            break
        chosen, explained = tried, share
    return chosen, explained


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


def _are_smallest(actual: Tensor, right: Tensor) -> bool:
    """Whether the weights that a candidate leaves out are, in each row, the smallest of those that count."""
    counts, is_left_out = right > SMALL_WEIGHT, actual.abs() < CLOSE * right
    largest_left_out = right.where(counts & is_left_out, 0.0).amax(dim=-1)
    smallest_kept = right.where(counts & ~is_left_out, math.inf).amin(dim=-1)
    return bool((largest_left_out <= (1 + CLOSE) * smallest_kept).all())


def describe_weights(
    implementation: Implementation, reference: Reference, *, is_random: bool = False
) -> tuple[str, tuple[str, ...], str]:
    """What the candidate's weights (B, H, T, S) show, which mistakes that could be, and the first step that differs.

    `reference` has scope `attention` and all query rows.
    """
    workload, inputs = reference.workload, reference.inputs

    def attend(value: Tensor) -> Tensor:
        case = build(workload, implementation, inputs.map(lambda tensor: tensor.clone()))
        tensors = {"key": reference.drawn.tensors["key"].to(value), "value": value}
        case.tensors.update(stored(replace(inputs, tensors=tensors), workload).tensors if workload.has_cache else {})
        if not workload.has_cache:
            case.tensors["value"] = value
        with torch.no_grad():
            return case.output()

    mask = oracle.row_mask(workload, torch.arange(workload.seq_len), inputs=reference.drawn.tensors)
    right = oracle.weights(reference.drawn.tensors["query"], reference.drawn.tensors["key"], mask)
    like = reference.drawn.tensors["value"].to(inputs.tensors["query"])
    actual = recover_weights(attend, like).double().cpu()
    ratio = (actual / right)[right > SMALL_WEIGHT]
    dropped = ratio.abs() < CLOSE
    kept, share = ratio[~dropped], float(dropped.double().mean())
    if 0 < share < 1 and len(kept) and not float((kept / kept.median() - 1).abs().max()) > CLOSE:
        factor = float(kept.median())
        if not is_random and _are_smallest(actual, right):
            times = f" and the others multiplied by {factor:.2f}" if abs(factor - 1) > CLOSE / 2 else ""
            return f"{UNKNOWN} Small weights are pruned: {share:.0%} of them are 0{times}.", (), "weights"
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
    ratios = [math.inf if each.ratio is None else each.ratio for _, each in wrong]
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
    limits = f"error {size}, tolerance {worst.allowed:.3g}"
    if worst.error is not None and worst.error <= worst.allowed:  # so its RMS error is what is beyond a limit
        rows = f"rows {worst.rows[0]} to {worst.rows[1] - 1}"
        limits = f"RMS error of {rows} {worst.rms:.3g}, tolerance {worst.allowed_rms:.3g}"
    return f"{worst.tensor} is {worst.grade} on {probe} inputs: {value} ({limits}){also}{by}"
