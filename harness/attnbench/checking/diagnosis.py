"""Diagnose a candidate that disagrees, in words: the nearest known mistake, and the first step that differs.

The verdict is known before, and does not depend on this. Closed forms come first: conventions, factors, float32
inside. Then every mistake of the catalogue is computed on the probe that shows the error best, and near ones are
compared on all probes by the tolerance of the check. A mistake may explain only the wrong rows, if the
others are right. If nothing explains the answers, the weights are recovered from outside, and described.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from torch import Tensor

from attnbench.checking import oracle, steps
from attnbench.checking.case import build
from attnbench.checking.conventions import settle
from attnbench.checking.mistakes import Mistake, catalogue
from attnbench.checking.reference import (
    Reference,
    ask,
    differences,
    largest,
    output_error,
    reference_for_probe,
    roundings,
)
from attnbench.contract import Implementation
from attnbench.storage.records import CONVENTIONS, FLOAT32, Agreement
from attnbench.workloads.workload import Workload

LINES = {
    "bottom_right_for_top_left": 'adapt(..., masks=("none", "causal_bottom_right"))',
    "causal_unasked": 'adapt(..., masks=("causal",))',
    "heads_for_positions": 'adapt(..., layout="bthk")',
    "mask_added_as_number": "adapt(..., call=lambda f, q, k, v, mask: f(q, k, v, mask.added(q.dtype)))",
    "mask_inverted": "adapt(..., call=lambda f, q, k, v, mask: f(q, k, v, mask.hidden))",
    "no_scale": "adapt(..., scale=1.0)",
}
"""The line that declares to an adapter what a check takes for a mistake, and its author may mean."""
_ROTARY = re.compile(r"\(rotary embedding, (?:in )?(halves|interleaved), .* base (\S+)\)")
SHORT_LEN = 67
MOST_HEADS = 4
MOST_ROWS = 2
MOST_SCORES = 2**16
"""Workloads with more scores than this are diagnosed at a short length, if they fail there too."""
LEAST_ROWS = 8
SHORTLIST = 24
MATCH = 4.0
"""A mistake explains a tensor that is within this many tolerances of the mistake's own answer."""
CLOSER = 0.5
"""It must also be closer than the right answer, by this factor."""
EXPLAINED = 0.9
"""A factor must explain at least this share of an error's squares."""
ROUNDING_EXPLAINED = 0.5
"""A rounding must explain at least this share of an error's squares: noise has next to none."""
LEAST_VALUES = 64
"""With fewer values a rounding explains this share of any noise by chance."""
OF_FEATURES = 1e-6
"""The largest share of an error's squares that factors of features may leave unexplained."""
HUGE = 1e6
"""Numbers larger than the tensor's largest by this factor are taken for old memory."""
SMALLEST = torch.finfo(torch.float64).tiny
STALE, UNKNOWN, FLOAT32_INSIDE = "outputs apart", "No known mistake explains it.", "float32_inside"
STALE_MISTAKE = "stale_output_buffer"
KEPT_OPERANDS = (("key",), ("value",), ("key", "value"), ("query",))
RULE_MISTAKES = {"inputs kept": "input_changed", STALE: STALE_MISTAKE, "layouts": "read_as_contiguous"}
STEPS = {"output": "context", "query": "scores", "key": "heads", "value": "heads", "sinks": "weights"}
"""The step that makes a factor of an output or gradient."""
RANDOM = {"dropout_in_evaluation", "dropout_without_rescaling"}
SMALL_WEIGHT = 1e-3
"""Ratios to smaller right weights mean nothing."""
CLOSE = 0.05
WEIGHT_ROUNDINGS = 16
"""Weights within this many roundings are right ..."""
MOST_OFF = 0.01
"""... but none that is further off than this."""
AXES = {
    4: ("batch row", "head", "row", "column"),
    3: ("batch row", "row", "column"),
    2: ("row", "column"),
    1: ("number",),
}


@dataclass(frozen=True)
class Finding:
    """An explanation: complete sentences, the names of mistakes, and the first step that differs."""

    words: str
    names: tuple[str, ...] = ()
    step: str = ""


def finding(words: str, names: Iterable[str], step: str, more: str = "", *, is_backward: bool = False) -> Finding:
    """The sentence "It looks as if `words`.", `more` sentences, and the first step that differs."""
    first = f"the backward pass of {step}" if is_backward else step
    sentence = f"It looks as if {words}.{more} First step that differs: {first}.".replace("if ,", "if,", 1)
    return Finding(sentence, tuple(dict.fromkeys(names)), step)


class Evidence:
    """A candidate's answers to one probe."""

    def __init__(self, implementation: Implementation, reference: Reference, convention: str | None = None) -> None:
        """Call the candidate, whose convention on other probes may be known; its exceptions propagate."""
        seen, here = settle(ask(implementation, reference), reference, convention)
        _, wider = output_error(seen.output, reference)
        if wider is not reference:  # at a long length a row is wrong that the reference left out
            reference, (seen, here) = wider, settle(ask(implementation, wider), wider, convention)
        self.convention = here if convention is None else convention
        self.reference, self.expected, self.rows = reference, dict(reference.expected), reference.rows
        self.observed = {
            name: seen.compared[name].detach().double().cpu() for name in self.expected if name in seen.compared
        }
        self.not_finite = [
            name for name, tensor in seen.compared.items() if name not in self.expected and not tensor.isfinite().all()
        ]
        judges = {name: reference.tolerances[name] for name in self.observed}
        self.beyond = {name: judge.beyond(self.observed[name]) for name, judge in judges.items()}
        self.limits = {name: judge.of_elements.clamp(min=SMALLEST) for name, judge in judges.items()}
        is_finite = bool(self.observed["output"].isfinite().all())
        self.own_dtype = reference.inputs.weights.query.dtype
        # After an overflow, mistakes are computed in the candidate's dtype; NaN spreads to gradients.
        self.dtype = torch.float64 if is_finite else self.own_dtype
        self.names = [*self.observed] if is_finite else ["output"]

    def is_wrong(self, name: str) -> bool:
        """Whether a tensor's errors exceed their limits."""
        return bool(self.beyond[name].any())

    def distance(
        self, mistake: Mistake, names: list[str], region: Tensor | None = None, *, is_quick: bool = False
    ) -> float:
        """The largest distance of the candidate from the mistake's answers, in tolerances, which differ by row.

        The answers are exact or, if that is nearer, computed in the candidate's dtype, which also widens the tolerance.
        With `region` (B, H, R), only those rows of the output are compared. `is_quick` takes exact answers only, and
        gives infinity if the right answers are nearly as near: the mistake changes nothing here.
        """
        asked = partial(self.reference.answers_of, mistake, rows=self.rows, has_gradients=names != ["output"])
        exact_ones, worst, error = asked(self.dtype), 0.0, 0.0
        own_ones = exact_ones if is_quick else asked(self.own_dtype)
        for name in names:
            shares = [of[name] / self.limits[name] for of in (self.observed, self.expected, exact_ones, own_ones)]
            observed, expected, exact, own = shares if region is None else [each[region] for each in shares]
            one = torch.finfo(self.own_dtype).eps / 2 * roundings(self.reference.workload, name, 0.0)
            limit = 2 * _apart(own, exact) + one * float(exact.nan_to_num().abs().max()) + 1
            worst = max(worst, min(_apart(observed, exact), _apart(observed, own)) / limit)
            error = max(error, _apart(observed, expected))
        return worst if worst <= CLOSER * error or not is_quick else math.inf


def explain(
    implementation: Implementation,
    references: dict[str, Reference],
    wrong: Agreement,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
) -> Agreement:
    """The agreement of a wrong candidate with its diagnosis; exceptions of another call to it propagate.

    To compute float64 inputs in float32 is a convention, and no mistake. `on_step` is called before each part.
    """
    if wrong.broken_rules and all(tensor.agrees for _, tensor in wrong.tensors()):
        rule = wrong.broken_rules[0]
        known = RULE_MISTAKES.get(rule.rule)
        result = Finding(f"{rule.found} (rule: {rule.rule})", (known,) if known else ())
    else:
        evidence = gather(implementation, references, seed)
        if (explained := _closed_form(evidence)) is None:
            cut(evidence)
            explained = _known(evidence, on_step) or _unwritten(evidence) or _stale(evidence)
            explained = explained or _unknown(implementation, evidence, wrong)
        if explained.names == (FLOAT32_INSIDE,) and not wrong.broken_rules:
            return msgspec.structs.replace(wrong, conventions=(*wrong.conventions, FLOAT32))
        result = replace(explained, words=f"{explained.words} {describe(wrong)}")
    return msgspec.structs.replace(wrong, diagnosis=result.words, mistakes=result.names, step=result.step)


def gather(implementation: Implementation, references: dict[str, Reference], seed: int) -> list[Evidence]:
    """The candidate's answers; at a simpler workload, which is faster to diagnose, if it is wrong there too."""

    def gathered(answered: Iterable[Reference]) -> list[Evidence]:
        evidence: list[Evidence] = []
        for reference in answered:
            evidence.append(Evidence(implementation, reference, evidence[0].convention if evidence else None))
        return evidence

    for simple in simpler(next(iter(references.values())).workload):
        with contextlib.suppress(Exception):  # the candidate may not support it
            evidence = gathered(reference_for_probe(simple, probe, seed) for probe in references)
            if any(each.is_wrong(name) for each in evidence for name in each.names):
                return evidence
    every = gathered(references.values())
    worst = next((each for each in every if each.is_wrong("output")), every[0])
    return [each for each in every if torch.equal(each.rows, worst.rows)]  # probes may have different rows


def cut(evidence: list[Evidence]) -> None:
    """Reduce very many scores of a wrong output to the rows that are worst on some probe, and some others."""
    workload, num_rows = evidence[0].reference.workload, len(evidence[0].rows)
    most = max(LEAST_ROWS, MOST_SCORES // (workload.batch_size * workload.num_heads * workload.kv_len))
    if num_rows > most and any(each.is_wrong("output") for each in evidence):
        apart = [differences(each.observed["output"], each.expected["output"])[0] for each in evidence]
        by_row = torch.stack(apart).movedim(-2, 0).flatten(1).amax(dim=1)  # (R,)
        places = torch.cat([by_row.topk(most // 2).indices, torch.linspace(0, num_rows - 1, most // 2).long()]).unique()
        for each in evidence:
            each.rows = each.rows[places]
            for tensors in (each.observed, each.expected, each.beyond, each.limits):
                tensors["output"] = tensors["output"].index_select(-2, places)


def simpler(workload: Workload) -> Iterator[Workload]:
    """Simpler workloads: without projections first, and at a short length, with fewer heads and batch rows first."""
    bare = msgspec.structs.replace(workload, scope="attention", bias="all") if workload.scope == "module" else workload
    for each in dict.fromkeys((bare, workload)):
        if each.num_scores > MOST_SCORES:
            short = each.at_length(min(SHORT_LEN, each.longest))
            times = each.num_heads // each.num_kv_heads
            groups = max(1, min(each.num_kv_heads, MOST_HEADS // times))
            sizes = {"batch_size": min(MOST_ROWS, each.batch_size), "num_kv_heads": groups, "num_heads": groups * times}
            yield from dict.fromkeys((msgspec.structs.replace(short, **sizes), short))
        elif each != workload:
            yield each


def _closed_form(evidence: list[Evidence]) -> Finding | None:
    """Test conventions, float32 inside, and constant factors on outputs or gradients."""
    if any(each.is_wrong(name) for each in evidence for name in each.names):
        return _narrow(evidence) or _factor(evidence) or _by_feature(evidence)
    if conventions := {each.convention: None for each in evidence if each.convention}:
        words = ("; ".join(map(CONVENTIONS.__getitem__, conventions))).capitalize()
        kind = next(iter(conventions)).removesuffix("_gradient")
        return Finding(f"{words}.", (f"{kind}_where_nothing_is_seen",), "weights")
    if lost := {name: None for each in evidence for name in each.not_finite}:
        words = f"The {', '.join(lost)} is not finite where it is 0: each query has all its weight on one key."
        return Finding(words, (), "weights")
    words = "It looks as if something is kept from an earlier call: asked once more, the candidate is right."
    return Finding(words, (STALE_MISTAKE,), "output")


def _narrow(evidence: list[Evidence]) -> Finding | None:
    """Test whether float64 cells are right by the tolerance of float32."""
    if evidence[0].reference.workload.dtype != "float64":
        return None
    for each in evidence:
        workload = msgspec.structs.replace(each.reference.workload, dtype="float32")
        drawn = each.reference.drawn
        narrow = Reference(workload, drawn, each.reference.seed, has_gradients=each.reference.has_gradients)
        for name in each.names:
            if not largest(each.observed[name], each.expected[name]) <= narrow.tolerance(name):
                return None
    return Finding("It looks as if it computes in float32 whatever the dtype of its inputs.", (FLOAT32_INSIDE,))


def _unwritten(evidence: list[Evidence]) -> Finding | None:
    """Test whether rows hold old memory, not finite or huge, while all other rows are right."""
    is_output = any(each.is_wrong("output") for each in evidence)
    names = [name for name in evidence[0].observed if (name == "output") is is_output]
    for name in (name for name in names if evidence[0].observed[name].dim() > 2):  # noqa: PLR2004
        these = [each for each in evidence if name in each.names]
        most = HUGE * max(float(each.expected[name].abs().max()) for each in these)
        length = these[0].observed[name].shape[-2]
        old, wrong = (
            _region(torch.stack(places).any(dim=0))[-2]
            for places in (
                [~(each.observed[name].abs() <= most) for each in these],
                [each.beyond[name] for each in these],
            )
        )
        if 0 < len(old) < length and torch.equal(old, wrong):
            where = _where([old], (length,), these[0].rows if is_output else None, ("row",))
            step = STEPS.get(name.removeprefix("gradient of "), "scores")
            words = f"the {name} was never written{where}: there it holds what memory held"
            return finding(words, [f"{name.replace(' ', '_')}_unwritten"], step, is_backward=not is_output)
    return None


def _factor(evidence: list[Evidence]) -> Finding | None:
    """Test whether the wrong part is a constant times the right one: in all rows, from one on, in some heads, ..."""
    names = ["output"]
    if not any(each.is_wrong("output") for each in evidence):  # gradients of tokens are sums over several queries
        names = [name for name in evidence[0].names if name not in {"output", "gradient of x", "gradient of context"}]
    sentences, kinds, step = [], [], "context"
    for name in (name for name in names if any(each.is_wrong(name) for each in evidence if name in each.names)):
        if (ratio := _ratio(evidence, name)) is None:
            return None
        factor, where = ratio
        operand = name.removeprefix("gradient of ").removesuffix(" weights")
        operand = next((kind for kind in STEPS if operand.startswith(kind)), "bias" if "bias" in operand else operand)
        kinds.append(f"{operand}{'_gradient' * (name != operand)}_{'factor' if factor else 'zero'}")
        step = STEPS.get(operand, "masked scores")
        zero = f"is 0{where}, as if it had never been written" if name == "output" else f"is 0{where}: none reaches it"
        times = f"is {factor:.5g} times what it should be{where}"
        sentences.append(f"the {name} {times if factor else zero}")
    return finding("; ".join(sentences), kinds, step, is_backward=names != ["output"]) if kinds else None


def _ratio(evidence: list[Evidence], name: str) -> tuple[float, str] | None:
    """The factor of a tensor's wrong part, and its place in words; None if there is none."""
    these = [each for each in evidence if name in each.names]
    if not all(each.observed[name].isfinite().all() for each in these):
        return None
    is_wrong = torch.stack([each.beyond[name] for each in these]).any(dim=0)
    region = _region(is_wrong)
    pairs = []
    for each in these:
        observed, expected = each.observed[name], each.expected[name]
        for dim, places in enumerate(region):
            observed, expected = observed.index_select(dim, places), expected.index_select(dim, places)
        allowed = each.reference.tolerance(name) or SMALLEST
        pairs.append((observed / allowed, expected / allowed))
    observed, expected = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
    factor = float((observed * expected).sum() / expected.square().sum()) if observed.any() else 0.0
    rest, error = ((observed - times * expected).square().sum() for times in (factor, 1.0))
    is_like = not factor or rest <= (1 - EXPLAINED) * observed.square().sum()
    is_near = largest(observed, factor * expected) <= MATCH / 2 * max(1.0, abs(factor))
    if not (is_like and is_near and rest <= (1 - EXPLAINED) * error):
        return None
    if not any(each.observed[name].any() for each in these):
        return 0.0, ""
    return factor, _where(region, tuple(is_wrong.shape), these[0].rows if name == "output" else None)


def _region(marked: Tensor) -> list[Tensor]:
    """The indices along each axis at which some place is marked."""
    every = marked.nonzero()
    return [every[:, dim].unique() for dim in range(marked.dim())]


def _by_feature(evidence: list[Evidence]) -> Finding | None:
    """Test whether each feature of the heads' outputs, before a module's output projection, has its own factor."""
    out, bias = evidence[0].reference.drawn.weights.out, evidence[0].reference.drawn.weights.out_bias
    these = [each for each in evidence if each.is_wrong("output") and each.reference.workload.scope == "module"]
    if not these or out is None or out.shape[0] != out.shape[1]:
        return None

    def merged(outputs: Iterable[Tensor]) -> Tensor:
        output = torch.cat([*outputs]).flatten(end_dim=1)  # (B*R,D)
        solved: Tensor = torch.linalg.solve(out, (output if bias is None else output - bias).T)
        return solved.T  # (B*R,H*V)

    observed = merged(each.observed["output"] for each in these)
    expected = merged(each.expected["output"] for each in these)
    factors = (observed * expected).sum(dim=0) / expected.square().sum(dim=0).clamp(min=SMALLEST)
    rest, error = ((observed - times * expected).square().sum() for times in (factors, 1.0))
    if not rest <= OF_FEATURES * error or len(observed) < LEAST_ROWS:  # NaN too
        return None
    low, high = float(factors.min()), float(factors.max())
    if math.isclose(low, high, rel_tol=1e-3):
        words = f"the heads' outputs are {float(factors.mean()):.5g} times what they should be"
        return finding(words, ["output_factor"], "context")
    words = f"each number of the heads' outputs is multiplied by one of its own, {low:.3g} to {high:.3g}, before the "
    words += "output projection: by a gate, or by a buffer that is drawn when the module is made"
    return finding(words, ["features_scaled"], "context")


def _where(region: list[Tensor], shape: tuple[int, ...], rows: Tensor | None, axes: tuple[str, ...] = ()) -> str:
    """A region of a tensor, given by indices, in words: "" for all of it."""
    words = []
    for axis, chosen, size in zip(axes or AXES[len(shape)], region, shape, strict=True):
        places = chosen if rows is None or axis != "row" else rows[chosen]
        first, last = int(places[0]), int(places[-1])
        if len(chosen) == size:
            continue
        if len(chosen) == 1:
            words.append(f"in {axis} {first}")
        elif int(chosen[-1]) == size - 1 and len(chosen) == size - int(chosen[0]):
            words.append(f"from {axis} {first} on")
        elif int(chosen[-1]) - int(chosen[0]) + 1 == len(chosen):
            words.append(f"in {axis}s {first} to {last}")
        else:
            some = ", ".join(map(str, places[:4].tolist()))
            words.append(f"in {len(chosen)} of {size} {axis}s ({some}{', ...' if len(chosen) > 4 else ''})")  # noqa: PLR2004
    return "".join(f" {each}" for each in words)


def _known(evidence: list[Evidence], on_step: Callable[[], object]) -> Finding | None:
    """The sentence about the mistakes that explain everything, or only the wrong rows if the others are right."""
    mistakes = [*catalogue(evidence[0].reference.workload)]
    if matches := match(evidence, mistakes, on_step) or _by_rounding(evidence, mistakes):
        return _sentence(matches)
    if (partly := _wrong_rows(evidence)) is None:
        return None
    where = _where(_region(partly), tuple(partly.shape), evidence[0].rows, AXES[partly.dim() + 1][:-1])
    return _sentence(match(evidence, mistakes, on_step, partly), f",{where}," if where else "")


def declaration(name: str, words: str) -> str:
    """A sentence with the line to write if the mistake `name`, described by `words`, is intended; or ""."""
    rotary = _ROTARY.search(words)
    base = float(f"{float(rotary[2]):.3g}") if rotary else 0.0  # the fit is off by less
    line = f'adapt(..., rotary="{rotary[1]}({base:g})")' if rotary else LINES.get(name)
    return f" If this is meant, write {line}." if line else ""


def _sentence(matches: list[Mistake], where: str = "") -> Finding | None:
    """A sentence that names the first mistake, and the others as equally likely; None if there are none."""
    if not matches:
        return None
    first, *others = matches
    more = declaration(first.name, first.words)
    if also := dict.fromkeys(each.words for each in others if each.name != first.name):
        more += f" On this workload that cannot be distinguished from: {'; '.join(also)}."
    names = (each.name for each in matches)
    return finding(f"{where} {first.words}".lstrip(), names, first.step, more, is_backward=first.is_gradient)


def _wrong_rows(evidence: list[Evidence]) -> Tensor | None:
    """The rows of the output that are wrong on some probe, (B, H, R) or (B, R), if not all are."""
    if not evidence[0].observed["output"].isfinite().all():
        return None
    rows = torch.stack([each.beyond["output"].any(dim=-1) for each in evidence]).any(dim=0)
    return rows if rows.any() and not rows.all() else None


def match(
    evidence: list[Evidence],
    mistakes: Iterable[Mistake],
    on_step: Callable[[], object] = lambda: None,
    region: Tensor | None = None,
) -> list[Mistake]:
    """The mistakes that explain everything, best first; those that are nearly as good as the best are as likely.

    With `region` (B, H, R), only those rows of the output are compared.
    """
    has_all_rows = all(len(each.rows) == each.reference.workload.seq_len for each in evidence)
    is_output_wrong = any(each.is_wrong("output") for each in evidence)
    parts: list[tuple[Evidence, list[str]]] = [(each, ["output"]) for each in evidence if is_output_wrong]
    for each in evidence if region is None else ():
        gradients = [name for name in each.names if name != "output"]
        if gradients and not (is_output_wrong and each.convention):
            parts.append((each, gradients))
    first = next(part for part in parts if any(map(part[0].is_wrong, part[1])))
    glances: list[tuple[float, int, Mistake]] = []
    for place, mistake in enumerate(mistakes):
        is_possible = not mistake.is_rounding and (has_all_rows or not mistake.needs_all_rows)
        if is_possible and mistake.is_gradient is not is_output_wrong:
            on_step()
            glances.append((first[0].distance(mistake, first[1], region, is_quick=True), place, mistake))
    worst: dict[Mistake, float] = {}
    for far, _, mistake in sorted(glances)[:SHORTLIST]:
        worst[mistake] = 0.0 if far < math.inf else far
        for each, names in parts:
            if worst[mistake] <= MATCH:
                on_step()
                worst[mistake] = max(worst[mistake], each.distance(mistake, names, region))
    explaining = sorted((each for each in worst if worst[each] <= MATCH), key=worst.__getitem__)
    return [each for each in explaining if worst[each] <= max(1.0, 2 * worst[explaining[0]])]


def _by_rounding(evidence: list[Evidence], mistakes: Iterable[Mistake]) -> list[Mistake]:
    """The rounding whose errors are large and small in the same places as the candidate's; none if there is none."""
    each = next((each for each in evidence if each.is_wrong("output")), None)
    if each is None or each.observed["output"].numel() < LEAST_VALUES or each.dtype != torch.float64:
        return []
    error, shares = each.observed["output"] - each.expected["output"], [(0.0, 0, 0.0)]
    known = [mistake for mistake in mistakes if mistake.is_rounding]
    for place, mistake in enumerate(known):
        rounded = each.reference.answers_of(mistake, each.own_dtype, rows=each.rows, has_gradients=False)["output"]
        rounded = rounded - each.expected["output"]
        along, size = float((rounded * error).sum()), float(rounded.square().sum()) or SMALLEST
        shares.append((along**2 / (size * float(error.square().sum())), place, along / size))
    share, place, factor = max(shares)
    return [known[place]] if share >= ROUNDING_EXPLAINED and CLOSER <= factor <= 1 / CLOSER else []


def _stale(evidence: list[Evidence]) -> Finding | None:
    """Test whether an answer is right for operands of another probe, as if they were kept from an earlier call."""
    right = Mistake(name="none", step="scores", words="", changes={})
    for each, other in itertools.permutations(evidence, 2):
        mine, others = each.reference.drawn, other.reference.drawn
        allowed, expected = each.reference.tolerance("output"), each.expected["output"]
        for names in KEPT_OPERANDS if each.is_wrong("output") else ():
            if set(names) <= set(mine.tensors):
                tensors = mine.tensors | {name: others.tensors[name] for name in names}
                stale = right.answer(each.reference.workload, each.rows)(replace(mine, tensors=tensors))
                is_other = largest(stale, expected) > 2 * MATCH * allowed
                if is_other and largest(each.observed["output"], stale) <= allowed:
                    words = f"It looks as if the {' and the '.join(names)} of an earlier call is used again."
                    return Finding(words, (STALE_MISTAKE,), "output")
    return None


def _apart(candidate: Tensor, mistaken: Tensor) -> float:
    """The largest difference; NaN must match NaN, and an empty row may be 0 or NaN."""
    broken = ~mistaken.isfinite()
    if (candidate.isfinite() & broken).any():
        return math.inf
    empty = (mistaken == 0).all(dim=-1, keepdim=True) & candidate.isnan().all(dim=-1, keepdim=True)
    distance = (candidate - mistaken).abs().masked_fill(broken | empty, 0.0)
    return math.inf if distance.isnan().any() else float(distance.max())


def recover_weights(attend: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The weights (B, H, T, S) of `attend`, which maps values (B, G, S, V) to a context (B, H, T, V).

    Attention is linear in its values: if column j of the values is 1 at one key and 0 elsewhere, column j of the
    context is the weight of that key. Each call recovers one key for each column in `like`.
    """
    key_len, width = like.shape[-2:]
    columns = []
    for start in range(0, key_len, width):
        count = min(width, key_len - start)
        unit = torch.zeros_like(like)
        unit[:, :, torch.arange(start, start + count), torch.arange(count)] = 1.0
        columns.append(attend(unit)[..., :count])
    return torch.cat(columns, dim=-1)


def _unknown(implementation: Implementation, evidence: list[Evidence], wrong: Agreement) -> Finding:
    """Describe a failure that no known mistake explains, by its weights, rules and notes."""
    random = next((rule.found for rule in wrong.notes if rule.rule == "repeatable"), "")
    stale = next((rule for rule in wrong.broken_rules if rule.rule == STALE), None)
    failing = next((each.reference for each in evidence if each.is_wrong("output")), None)
    result = Finding(UNKNOWN)
    if failing is None:
        names = sorted({name for each in evidence for name in each.names if each.is_wrong(name)})
        words = f"{UNKNOWN} The output is right, the backward pass is not ({', '.join(names)})."
        result = Finding(words, (), "backward pass")
    elif failing.workload.scope == "attention" and len(failing.rows) == failing.workload.seq_len:
        with contextlib.suppress(Exception):  # a candidate may fail on unit vectors
            result = describe_weights(implementation, failing, is_random=bool(random))
    if random and not result.names:
        if result.step != "weights":
            words = f"Is dropout, or something else random, active in evaluation? On equal inputs {random}."
            return Finding(words, tuple(sorted(RANDOM)), "weights")
        result = replace(result, words=f"Something random is active: on equal inputs {random}. {result.words}")
    if stale is not None:
        words = f"{stale.found[0].upper()}{stale.found[1:]} (rule: {STALE}). {result.words}"
        return Finding(words, (STALE_MISTAKE,), result.step)
    return result


def describe_weights(implementation: Implementation, reference: Reference, *, is_random: bool = False) -> Finding:
    """Describe the candidate's weights (B, H, T, S) on the reference's queries and keys.

    `reference` has scope `attention` and all query rows.
    """
    workload = msgspec.structs.replace(reference.workload, direction="inference")
    inputs = reference.inputs

    def attend(value: Tensor) -> Tensor:
        case = build(workload, implementation, inputs.map(lambda tensor: tensor.clone()))
        case.tensors["value"] = value
        with torch.no_grad():
            return case.output()

    rows = torch.arange(workload.seq_len)
    mask = oracle.row_mask(workload, rows, inputs=reference.drawn.tensors)
    results = steps.attend(*oracle.heads(workload, reference.drawn, rows), mask)
    right, like = results["weights"], reference.drawn.tensors["value"].to(inputs.tensors["query"])
    actual = recover_weights(attend, like).double().cpu()
    is_lost = (actual == 0) & (right > SMALL_WEIGHT)
    if is_random and is_lost.any():
        factor = float((actual / right)[(right > SMALL_WEIGHT) & ~is_lost].median())
        name, how = ("in_evaluation", f"multiplied by {factor:.2f}")
        if abs(factor - 1) < CLOSE / 2:
            name, how = ("without_rescaling", "as they were, without rescaling")
        share = float(is_lost.double().sum() / (right > SMALL_WEIGHT).sum())
        words = f"dropout is active in evaluation: {share:.0%} of the weights are 0, the others {how}"
        return finding(words, [f"dropout_{name}"], "weights")
    allowed = min(WEIGHT_ROUNDINGS * torch.finfo(inputs.weights.query.dtype).eps, MOST_OFF)
    apart, place = differences(actual, right)
    if float(apart.max()) <= allowed:
        return Finding(f"{UNKNOWN} On these queries and keys its weights are right: the values are not.", (), "context")
    if workload.sinks == "none" and (known := _by_weights(actual, results, mask, allowed)):
        return known
    batch, head, row, column = place
    actual_words, right_words = _distinct(float(actual[place]), float(right[place]))
    facts = [
        f"query {row} gives key {column} {actual_words} where {right_words} is right (batch row {batch}, head {head})"
    ]
    sums = actual.sum(dim=-1)
    low, high = float(sums.min()), float(sums.max())
    if max(abs(low - 1), abs(high - 1)) > CLOSE:
        facts.append(f"a query's weights add up to {low:.3g} to {high:.3g}, not 1")
    leaked = float(actual.where(~mask.seen, 0.0).abs().max())
    if leaked > SMALL_WEIGHT:
        facts.append(f"hidden keys get up to {leaked:.3g}")
    return Finding(f"{UNKNOWN} Its weights, seen from outside: {'; '.join(facts)}.", (), "weights")


def _by_weights(actual: Tensor, results: dict[str, Tensor], mask: oracle.RowMask, allowed: float) -> Finding | None:
    """Whether the weights (B, H, T, S) are the softmax of scaled scores, or of the right scores of other keys."""
    seen, masked = actual > 0, results["masked scores"]
    other = steps.hide(mask.changed(results["scores"]), seen).softmax(dim=-1).nan_to_num(0.0)
    if not torch.equal(seen, mask.seen.expand_as(seen)) and largest(other, actual) <= allowed:
        words = f"{_visible(seen[0, 0])}, where the mask is {mask.rule}"
        return finding(words, ["mask_of_its_own"], "masked scores")
    is_clear = mask.seen & (actual > 0) & (results["weights"] > 0)
    count = is_clear.sum(dim=-1, keepdim=True).clamp(min=1)
    logs, scores = (each.where(is_clear, 0.0) for each in (actual.log(), masked))
    logs, scores = ((each - each.sum(-1, keepdim=True) / count).where(is_clear, 0.0) for each in (logs, scores))
    factor = float((logs * scores).sum() / scores.square().sum().clamp(min=SMALLEST))
    scaled = torch.softmax(factor * masked, dim=-1).nan_to_num(0.0)
    if abs(factor - 1) <= 2 * allowed or largest(scaled, actual) > min(
        2 * allowed, CLOSER * largest(results["weights"], actual)
    ):
        return None
    words = f"the scores are {factor:.4g} times what they should be, as if the softmax had a temperature"
    return finding(words, ["scores_scaled"], "scores")


def _visible(seen: Tensor) -> str:
    """The keys that queries see (T, S), in words: a range relative to the query, if they are one."""
    length = seen.shape[1]
    places = torch.arange(length)
    first, last = (places.where(seen, empty) for empty in (length, -1))
    first, last, query = first.amin(dim=1), last.amax(dim=1), torch.arange(len(seen))
    before, after = {*(query - first)[first > 0].tolist()}, {*(last - query)[last < length - 1].tolist()}
    is_range = torch.equal(seen, (places >= first[:, None]) & (places <= last[:, None]))
    if not is_range or len(before) > 1 or len(after) > 1:
        return "queries see other keys than those of the mask"
    start = f"key i{-before.pop():+d}" if before else "key 0"
    end = f"key i{after.pop():+d}" if after else "the last key"
    return f"query i sees {start} to {end}".replace("i+0", "i")


def _distinct(actual: float, right: float) -> tuple[str, str]:
    """Two numbers with just enough digits to show that they differ, at least three."""
    for digits in range(3, 18):
        words = f"{actual:.{digits}g}", f"{right:.{digits}g}"
        if words[0] != words[1]:
            return words
    return words


def describe(agreement: Agreement) -> str:
    """The place and size of the worst error of the output, or else of a gradient, and the probes that show it."""
    wrong = [(probe, tensor) for probe, tensor in agreement.tensors() if not tensor.agrees]
    ratios = [math.inf if each.ratio is None else each.ratio for _, each in wrong]
    probe, worst = max(zip(wrong, ratios, strict=True), key=lambda item: (item[0][1].tensor == "output", item[1]))[0]
    place = ", ".join(map(str, worst.worst))
    actual, expected = _distinct(math.nan if worst.actual is None else worst.actual, worst.expected)
    actual = "not finite" if worst.actual is None else actual
    value = f"at [{place}] it is {actual}, the oracle says {expected}"
    if not worst.worst:
        value = f"it is {actual}, the oracle says {expected} throughout"
    size = "not finite" if worst.error is None else f"{worst.error:.3g}"
    others = sorted({tensor.tensor for _, tensor in wrong} - {worst.tensor})
    also = f"; also wrong: {', '.join(others)}" if others else ""
    finders = dict.fromkeys(name for name, _ in wrong)
    blind = [each.probe for each in agreement.probes if each.probe not in finders]
    by = f"; found by: {', '.join(finders)}" + (f", not by {', '.join(blind)}" if blind else "")
    limits = f"error {size}, tolerance {worst.allowed:.3g}"
    if worst.error is not None and worst.error <= worst.allowed:  # its RMS error is beyond the limit
        rows = f"rows {worst.rows[0]} to {worst.rows[1] - 1}"
        limits = f"RMS error of {rows} {worst.rms:.3g}, tolerance {worst.allowed_rms:.3g}"
    return f"{worst.tensor} is {worst.grade} on {probe} inputs: {value} ({limits}){also}{by}"
