"""Diagnose a candidate that disagrees, in words: the nearest known mistake, and the first step that differs.

Closed forms come first: answers of an earlier call, unwritten rows, factors. Then every mistake of the catalogue is
computed on the probe that shows the error best, and near ones are compared in full, by the tolerance of the check. A
mistake may explain only the wrong rows, if the others are right. Then numbers are fitted: a temperature, the keys that
a query sees, a rotary base, roundings. If nothing explains the answers, the diagnosis describes the weights that the
candidate uses.
"""

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnbench.checking import oracle, steps
from attnbench.checking.case import build
from attnbench.checking.conventions import settle
from attnbench.checking.mistakes import Mistake, catalogue
from attnbench.checking.mistakes.wrong_masks import showing
from attnbench.checking.reference import (
    Reference,
    ask,
    differences,
    largest,
    reference_for_probe,
    roundings,
)
from attnbench.checking.steps import Textbook, wrong
from attnbench.contract import Implementation
from attnbench.contract.declared import declaration
from attnbench.storage.records import CONVENTIONS, Agreement
from attnbench.workloads.workload import Workload

SHORT_LEN = 67
MOST_HEADS = 4
MOST_ROWS = 2
MOST_SCORES = 2**16
"""Workloads with more scores than this are diagnosed at a short length, if they fail there too."""
LEAST_ROWS = 8
SHORTLIST = 32
SHORTLIST_BACKWARD = 8
MATCH = 4.0
"""A mistake explains a tensor that is within this many tolerances of the mistake's own answer."""
EXPLAINED = 0.9
"""A fitted number must explain at least this share of an error's squares."""
ROUNDING_EXPLAINED = 0.38
"""Roundings to bfloat16 must explain at least this share of an error's squares (noise has next to none) ..."""
ROUNDING_CORRELATION = 0.36
"""... and one of them must correlate with it at least this well."""
LEAST_VALUES = 64
"""With fewer values, a few roundings explain this share of any noise by chance."""
LEAST_SHARE = 0.03
"""A further rounding must explain at least this additional share."""
ROUNDING_SPAN = 8.0
"""The largest ratio of an error to the roundings computed here; sums in another order may reach it."""
OF_FEATURES = 1e-6
"""The largest share of an error's squares that factors of features may leave unexplained."""
SMALLEST = torch.finfo(torch.float64).tiny
MOST_FITS = 10
MOST_TIMES = 1e3
"""The largest fitted number."""
WORSE = 1.01
"""A number is fitted only if its first guess is no worse than no mistake at all."""
FITTED_ROWS = 6
COMMON = {
    *("mask_ignored", "causal_unasked", "mask_inverted", "mask_argument", "mask_after_softmax", "no_softmax"),
    *("bottom_right_for_top_left", "no_scale", "scaled_by_width", "scaled_by_embedding", "kv_heads_interleaved"),
    *("keys_and_values_head_order", "value_head_order", "softmax_over_heads", "softmax_over_queries", "bias_ignored"),
    *("not_normalised", "output_head_order", "no_output_projection", "no_output_bias", "no_input_biases"),
}
"""Mistakes that are also tried in pairs."""
RULE_MISTAKES = {
    "inputs kept": "input_changed",
    "outputs apart": "stale_output_buffer",
    "layouts": "read_as_contiguous",
}
STALE = "outputs apart"
UNKNOWN = "No known mistake explains it."
FLOAT32_INSIDE = "float32_inside"
KEPT_OPERANDS = (("key",), ("value",), ("key", "value"), ("query",))
STEPS = {"output": "context", "query": "scores", "key": "heads", "value": "heads", "sinks": "weights"}
"""The step that makes a factor of an output or gradient."""
RANDOM = {"dropout_in_evaluation", "dropout_without_rescaling"}
SMALL_WEIGHT = 1e-3
"""Ratios to smaller right weights mean nothing."""
CLOSE = 0.05
WEIGHT_ROUNDINGS = 16
"""Weights within this many roundings are right."""
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


class Evidence:
    """A candidate's answers to one probe."""

    def __init__(self, implementation: Implementation, reference: Reference, convention: str | None = None) -> None:
        """Call the candidate, whose convention on other probes may be known; its exceptions propagate."""
        seen, here = settle(ask(implementation, reference), reference, convention)
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
        self.books: dict[torch.dtype, Textbook] = {}

    @property
    def gradients(self) -> list[str]:
        """The names of the compared gradients."""
        return [name for name in self.names if name != "output"]

    def is_wrong(self, name: str) -> bool:
        """Whether a tensor's errors exceed their limits."""
        return bool(self.beyond[name].any())

    @property
    def has_all_rows(self) -> bool:
        """Whether every query row is compared."""
        return len(self.rows) == self.reference.workload.seq_len

    def book(self, dtype: torch.dtype) -> Textbook:
        """The right steps at these rows."""
        if dtype not in self.books:
            inputs = self.reference.drawn.map(lambda tensor: tensor.to(dtype))
            self.books[dtype] = book = Textbook(self.reference.workload, inputs, self.rows)
            _ = book.right  # a part of it starts every mistake
        return self.books[dtype]

    @torch.no_grad()
    def output(self, mistake: Mistake, dtype: torch.dtype = torch.float64) -> Tensor:
        """The mistake's output at these rows in float64: (B, H, R, V), or (B, R, D) in scope `module`."""
        return self.book(dtype).output(mistake.changes).double()

    def answers(self, mistake: Mistake, names: Collection[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """The mistake's answers in float64, computed in `dtype`: the output alone, or the gradients too."""
        if [*names] == ["output"]:
            return {"output": self.output(mistake, dtype)}
        return self.reference.answers_of(mistake, dtype)


def explain(  # noqa: PLR0913 - the last two have usable defaults
    implementation: Implementation,
    references: dict[str, Reference],
    wrong: Agreement,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
    *,
    earlier: Sequence[Agreement] = (),
) -> Agreement:
    """The agreement of a wrong candidate with its diagnosis; exceptions of another call to it propagate.

    `on_step` is called before each part of the work. `earlier` are diagnoses of the same candidate at other workloads.
    A mistake that one of them named is tried first, and no other is tried if it explains this failure too. If none
    explained a failure with the same symptoms, or that one was random, no mistake is tried.
    """

    def diagnosed(found: Finding) -> Agreement:
        return msgspec.structs.replace(wrong, diagnosis=found.words, mistakes=found.names, step=found.step)

    if wrong.broken_rules and all(tensor.agrees for _, tensor in wrong.tensors()):
        rule = wrong.broken_rules[0]
        known = RULE_MISTAKES.get(rule.rule)
        return diagnosed(Finding(f"{rule.found} (rule: {rule.rule})", (known,) if known else ()))
    evidence, place = gather(implementation, references, seed), describe(wrong)
    before = {name for each in earlier for name in each.mistakes} - RANDOM
    alike = [set(each.mistakes) for each in earlier if each.diagnosis and symptoms(each) == symptoms(wrong)]
    if (found := _closed_form(evidence)) is None:
        if any(each.is_wrong("output") for each in evidence):
            cut(evidence)
        found = _known(evidence, on_step, before) if before else None
    if found is None and set() in alike:
        return diagnosed(Finding(f"{UNKNOWN} The failure looks like an earlier one. {place}"))
    if found is None and not any(names <= RANDOM for names in alike):
        found = _known(evidence, on_step) or _sentence(match(evidence, _pairs(evidence[0].reference.workload), on_step))
        found = found or _stale(evidence) or _unwritten(evidence)
    found = found or _unknown(implementation, evidence, wrong)
    return diagnosed(replace(found, words=f"{found.words} {place}"))


def symptoms(wrong: Agreement) -> tuple[frozenset[str], frozenset[str]]:
    """The symptoms of a failure: the wrong tensors, and the broken rules."""
    tensors = frozenset(tensor.tensor for _, tensor in wrong.tensors() if not tensor.agrees)
    return tensors, frozenset(rule.rule for rule in wrong.broken_rules)


def gather(implementation: Implementation, references: dict[str, Reference], seed: int) -> list[Evidence]:
    """The candidate's answers; at a short length, which is faster to diagnose, if it is wrong there too."""
    workload = next(iter(references.values())).workload
    for short in shorter(workload) if workload.num_scores > MOST_SCORES else ():
        try:
            at_short = _gathered(implementation, (reference_for_probe(short, probe, seed) for probe in references))
        except Exception:  # noqa: BLE001, S112 - the candidate may not support these sizes
            continue
        if any(each.is_wrong(name) for each in at_short for name in each.names):
            return at_short
    every = _gathered(implementation, references.values())
    worst = next((each for each in every if each.is_wrong("output")), every[0])
    return [each for each in every if torch.equal(each.rows, worst.rows)]  # probes may have different rows


def _gathered(implementation: Implementation, references: Iterable[Reference]) -> list[Evidence]:
    evidence: list[Evidence] = []
    for reference in references:
        evidence.append(Evidence(implementation, reference, evidence[0].convention if evidence else None))
    return evidence


def cut(evidence: list[Evidence]) -> None:
    """Reduce very many scores to the rows that are worst on some probe, and some others."""
    workload, num_rows = evidence[0].reference.workload, len(evidence[0].rows)
    most = max(LEAST_ROWS, MOST_SCORES // (workload.batch_size * workload.num_heads * workload.kv_len))
    if num_rows > most:
        apart = [differences(each.observed["output"], each.expected["output"])[0] for each in evidence]
        by_row = torch.stack(apart).movedim(-2, 0).flatten(1).amax(dim=1)  # (R,)
        places = torch.cat([by_row.topk(most // 2).indices, torch.linspace(0, num_rows - 1, most // 2).long()]).unique()
        for each in evidence:
            each.rows, each.books = each.rows[places], {}
            for tensors in (each.observed, each.expected, each.beyond, each.limits):
                tensors["output"] = tensors["output"].index_select(-2, places)


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


# Closed forms.


def _closed_form(evidence: list[Evidence]) -> Finding | None:
    """Test conventions, float32 inside, and constant factors on outputs or gradients."""
    if not any(each.is_wrong(name) for each in evidence for name in each.names):
        if conventions := {each.convention: None for each in evidence if each.convention}:
            words = ("; ".join(map(CONVENTIONS.__getitem__, conventions))).capitalize()
            kind = next(iter(conventions)).removesuffix("_gradient")
            return Finding(f"{words}.", (f"{kind}_where_nothing_is_seen",), "weights")
        if lost := {name: None for each in evidence for name in each.not_finite}:
            words = f"The {', '.join(lost)} is not finite where it is 0: each query has all its weight on one key."
            return Finding(words, (), "weights")
        words = "It looks as if something is kept from an earlier call: asked once more, the candidate is right."
        return Finding(words, (RULE_MISTAKES[STALE],), "output")
    return _narrow(evidence) or _factor(evidence) or _by_feature(evidence)


def _unwritten(evidence: list[Evidence]) -> Finding | None:
    """Test whether gradient rows hold old memory: numbers that are not finite, or larger than all others."""
    if any(each.is_wrong("output") for each in evidence):
        return None

    def rows_of(places: Iterable[Tensor]) -> Tensor:
        """Whether any of these marks each row (R,)."""
        return torch.stack([each.movedim(-2, 0).flatten(1).any(dim=1) for each in places]).any(dim=0)

    tokens = [name for name in evidence[0].names if evidence[0].observed[name].dim() > 2]  # noqa: PLR2004
    for name in tokens:
        these = [each for each in evidence if name in each.names]
        most = MOST_TIMES**2 * max(float(each.expected[name].abs().max()) for each in these)
        rows = rows_of(~(each.observed[name].abs() <= most) for each in these)
        if rows.any() and not rows.all() and not (rows_of(each.beyond[name] for each in these) & ~rows).any():
            where = _where([rows.nonzero()[:, 0]], (len(rows),), None, ("row",))
            words = f"It looks as if the {name} were never written{where}: there it holds what memory held."
            step = STEPS.get(name.removeprefix("gradient of "), "scores")
            text = f"{words} First step that differs: the backward pass of {step}."
            return Finding(text, (f"{name.replace(' ', '_')}_unwritten",), step)
    return None


def _stale(evidence: list[Evidence]) -> Finding | None:
    """Test whether an answer is that to other inputs, or to some operands of other inputs."""
    for each, other in itertools.permutations(evidence, 2):
        mine, others = each.reference.drawn, other.reference.drawn
        allowed, right = each.reference.tolerance("output"), each.expected["output"]
        for names in (tuple(mine.tensors), *KEPT_OPERANDS) if each.is_wrong("output") else ():
            if not set(names) <= set(mine.tensors):
                continue
            tensors = mine.tensors | {name: others.tensors[name] for name in names}
            stale = Textbook(each.reference.workload, replace(mine, tensors=tensors), each.rows).output({})
            if largest(stale, right) > 2 * MATCH * allowed and largest(each.observed["output"], stale) <= allowed:
                what = "the output" if len(names) == len(mine.tensors) else f"the {' and the '.join(names)}"
                words = f"It looks as if {what} of an earlier call is used again, with other inputs."
                return Finding(words, (RULE_MISTAKES[STALE],), "output")
    return None


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
        zero = "is 0{}, as if it had never been written" if name == "output" else "is 0{}: none reaches it"
        times = f"is {factor:.6g} times what it should be{_constant(factor, evidence)}{{}}" if factor else zero
        sentences.append(f"the {name} {times.format(where)}")
    if not kinds:
        return None
    first = step if names == ["output"] else f"the backward pass of {step}"
    return Finding(
        f"It looks as if {'; '.join(sentences)}. First step that differs: {first}.", tuple(dict.fromkeys(kinds)), step
    )


def _by_feature(evidence: list[Evidence]) -> Finding | None:
    """Test whether each feature of the context, heads side by side, has its own factor."""
    weights, workload = evidence[0].reference.drawn.weights, evidence[0].reference.workload
    is_module, these = workload.scope == "module", [each for each in evidence if each.is_wrong("output")]
    if not these or (is_module and (weights.out is None or weights.out.shape[0] != weights.out.shape[1])):
        return None

    def context(output: Tensor, each: Evidence) -> Tensor:
        output = output / each.reference.tolerance("output")
        if not is_module:
            return output.movedim(1, -2).flatten(end_dim=1).flatten(1)  # (B,H,R,V) -> (B*R,H*V)
        assert weights.out is not None
        plain = output if weights.out_bias is None else output - weights.out_bias / each.reference.tolerance("output")
        merged: Tensor = torch.linalg.solve(weights.out, plain.flatten(end_dim=1).T).T  # (B*R,D) -> (B*R,H*V)
        return merged

    observed = torch.cat([context(each.observed["output"], each) for each in these])
    expected = torch.cat([context(each.expected["output"], each) for each in these])
    if not observed.isfinite().all() or len(observed) < LEAST_ROWS:
        return None
    factors = (observed * expected).sum(dim=0) / expected.square().sum(dim=0).clamp(min=SMALLEST)
    rest, error = ((observed - times * expected).square().sum() for times in (factors, 1.0))
    if not rest <= OF_FEATURES * error:
        return None
    words = (
        f"It looks as if each number of the heads' outputs is multiplied by one of its own, "
        f"{float(factors.min()):.3g} to {float(factors.max()):.3g},{' before the output projection' * is_module}: "
        "by a gate, or by a buffer that is drawn when the module is made. First step that differs: context."
    )
    return Finding(words, ("features_scaled",), "context")


def _ratio(evidence: list[Evidence], name: str) -> tuple[float, str] | None:
    """The factor of a tensor's wrong part, and its place in words; None if there is none."""
    these = [each for each in evidence if name in each.names]
    if not all(each.observed[name].isfinite().all() for each in these):
        return None
    is_wrong = torch.stack([each.beyond[name] for each in these]).any(dim=0)
    region = [
        is_wrong.movedim(dim, 0).reshape(size, -1).any(dim=1).nonzero()[:, 0] for dim, size in enumerate(is_wrong.shape)
    ]
    weights = these[0].reference.drawn.weights
    is_projected = name == "output" and these[0].reference.workload.scope == "module"
    bases = [torch.zeros(()), *([weights.out_bias] if is_projected and weights.out_bias is not None else [])]
    for base in bases:
        pairs = []
        for each in these:
            observed, expected = (tensor - base for tensor in (each.observed[name], each.expected[name]))
            for dim, places in enumerate(region):
                observed, expected = observed.index_select(dim, places), expected.index_select(dim, places)
            allowed = each.reference.tolerance(name) or SMALLEST
            pairs.append((observed / allowed, expected / allowed))
        observed, expected = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
        factor = float((observed * expected).sum() / expected.square().sum()) if observed.any() else 0.0
        rest, error = ((observed - times * expected).square().sum() for times in (factor, 1.0))
        is_like = not factor or rest <= (1 - EXPLAINED) * observed.square().sum()
        if (
            is_like
            and rest <= (1 - EXPLAINED) * error
            and largest(observed, factor * expected) <= MATCH / 2 * max(1.0, abs(factor))
        ):
            if not any(each.observed[name].any() for each in these):
                return 0.0, ""
            return _neat(factor), _where(region, tuple(is_wrong.shape), these[0].rows if name == "output" else None)
    return None


def _neat(factor: float) -> float:
    """The number with only its certain digits."""
    return float(f"{factor:.3g}") if math.isclose(factor, float(f"{factor:.3g}"), rel_tol=1e-5) else factor


def _constant(factor: float, evidence: list[Evidence]) -> str:
    """Possible meanings of a factor."""
    workload = evidence[0].reference.workload
    scale, root = workload.score_scale, math.sqrt(workload.head_dim)
    known = {"1/scale": 1 / scale, "the scale": scale, "sqrt(K)": root, "1/sqrt(K)": 1 / root}
    known |= {"1/H": 1 / workload.num_heads, "H": workload.num_heads}
    return next((f" ({words})" for words, number in known.items() if math.isclose(number, factor, rel_tol=1e-3)), "")


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


# Known mistakes.


def _known(
    evidence: list[Evidence], on_step: Callable[[], object] = lambda: None, names: Collection[str] = ()
) -> Finding | None:
    """The sentence about the mistakes that explain everything, or only the wrong rows if the others are right.

    With `names`, only these are tried.
    """
    known = [each for each in catalogue(evidence[0].reference.workload) if not names or each.name in names]
    if matches := match(evidence, known, on_step):
        return _sentence(matches)
    if (partly := _wrong_rows(evidence)) is None:
        return None
    region = [partly.movedim(dim, 0).flatten(1).any(dim=1).nonzero()[:, 0] for dim in range(partly.dim())]
    where = _where(region, tuple(partly.shape), evidence[0].rows, AXES[partly.dim() + 1][:-1])
    return _sentence(match(evidence, known, on_step, partly), f",{where}," if where else "")


def _sentence(matches: list[Mistake], where: str = "") -> Finding | None:
    """The sentence about mistakes, of which the first is named and the others are as likely; None if there is none."""
    if not matches:
        return None
    first, *others = matches
    words = f"It looks as if{where} {first.words}.{declaration(first.name, first.words)}"
    also = dict.fromkeys(each.words for each in others if each.name != first.name or each.is_rounding)
    if also and first.is_rounding:  # these add up
        words += f" And as if {'; '.join(also)}."
    elif also:
        words += f" On this workload that cannot be distinguished from: {'; '.join(also)}."
    step = f"the backward pass of {first.step}" if first.is_gradient else first.step
    names = tuple({each.name: None for each in matches})
    return Finding(f"{words} First step that differs: {step}.", names, first.step)


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
    partly: Tensor | None = None,
) -> list[Mistake]:
    """The mistakes that explain everything, best first; those that are nearly as good as the best are as likely.

    With `partly` (B, H, R), only those rows of the output are compared.
    """
    has_all_rows = all(each.has_all_rows for each in evidence)
    known = [
        each
        for each in mistakes
        if not (each.is_random or each.is_memory or each.is_factor) and (has_all_rows or not each.needs_all_rows)
    ]
    is_output_wrong = any(each.is_wrong("output") for each in evidence)
    exact = [each for each in known if not (each.fit or each.is_rounding)]
    trials = [Trial(each) for each in exact if each.is_gradient is not is_output_wrong]
    if is_output_wrong:
        # Start with the errors on one probe: they leave few candidates.
        for each in sorted(evidence, key=lambda each: not each.is_wrong("output")):
            trials = _nearest(trials, each, ["output"], partly, on_step)[:SHORTLIST]
            for trial in trials:
                trial.compare(each, ["output"], partly)
            trials = [trial for trial in trials if trial.worst <= MATCH]
    else:
        first = next(each for each in evidence if any(each.is_wrong(name) for name in each.names))
        trials = _nearest(trials, first, first.gradients, None, on_step)[:SHORTLIST_BACKWARD]
    limit = MATCH
    for trial in sorted(trials, key=lambda trial: trial.worst):  # best first: it excludes most others
        for each in evidence if partly is None else ():
            if trial.worst <= limit and each.gradients and not each.convention:
                on_step()
                trial.compare(each, each.gradients)
        limit = limit if trial.is_idle else min(limit, max(1.0, 2 * trial.worst))
    explaining = [trial for trial in trials if trial.worst <= limit and not trial.is_idle]
    if is_output_wrong and partly is None and not any(trial.worst <= 1 for trial in explaining):
        on_step()  # no mistake fits closely: fit numbers
        explaining += _fitted([each for each in known if each.fit], evidence)
    if explaining:
        explaining.sort(key=lambda trial: trial.worst)
        limit = min(MATCH, max(1.0, 2 * explaining[0].worst))
        return [trial.mistake for trial in explaining if trial.worst <= limit]
    if not is_output_wrong or partly is not None:
        return []
    return _by_rounding([each for each in known if each.is_rounding], evidence)


def _pairs(workload: Workload) -> Iterator[Mistake]:
    """Two common mistakes at once, in different steps."""
    common = [each for each in catalogue(workload) if each.name in COMMON and not each.is_gradient]
    for one, other in itertools.combinations(common, 2):
        if not set(one.changes) & set(other.changes):
            first, second = sorted((one, other), key=lambda each: [*steps.DEFAULTS].index(each.step))
            yield replace(
                first,
                name=f"{first.name}+{second.name}",
                words=f"{first.words}; and as if {second.words}",
                changes={**first.changes, **second.changes},
                needs_all_rows=one.needs_all_rows or other.needs_all_rows,
            )


class Trial:
    """A mistake, and its largest distance from the candidate so far, as a share of the tolerance."""

    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake
        self.worst = 0.0
        self.is_idle = True  # it changes nothing here, so it explains nothing

    def compare(self, each: Evidence, names: Collection[str], partly: Tensor | None = None) -> None:
        """Compare the observed tensors with the mistake's answers: exact, and in the candidate's dtype.

        Differences are in units of the tolerance, which differs from row to row. With `partly` (B, H, R), only those
        rows of the output are compared.
        """
        exact_ones, own_ones = (each.answers(self.mistake, names, dtype) for dtype in (each.dtype, each.own_dtype))
        for name in names:
            tensors = each.observed[name], each.expected[name], exact_ones[name], own_ones[name]
            observed, expected, exact, own = (_in_limits(tensor, each, name, partly) for tensor in tensors)
            one = torch.finfo(each.own_dtype).eps / 2 * roundings(each.reference.workload, name, 0.0)
            self.is_idle &= largest(exact, expected) <= 1
            limit = 2 * _apart(own, exact) + one * float(exact.nan_to_num().abs().max()) + 1
            apart = min(_apart(observed, exact), _apart(observed, own))
            self.worst = max(self.worst, apart / limit)


def _in_limits(tensor: Tensor, each: Evidence, name: str, partly: Tensor | None) -> Tensor:
    """A tensor in units of its tolerance, perhaps only some rows of it."""
    shares = tensor / each.limits[name]
    return shares if partly is None else shares[partly]


def _nearest(
    trials: list[Trial], each: Evidence, names: Collection[str], partly: Tensor | None, on_step: Callable[[], object]
) -> list[Trial]:
    """The mistakes whose answers are nearest on one probe, beyond the tolerance and as a share of their size."""
    near = []
    for trial in trials:
        on_step()
        answers, apart = each.answers(trial.mistake, names, each.dtype), -math.inf
        for name in names:
            answer, observed = (_in_limits(of[name], each, name, partly) for of in (answers, each.observed))
            size = float(answer.nan_to_num().abs().max()) or 1.0
            apart = max(apart, (_apart(observed, answer) - 1) / size)
        near.append((apart, trial))
    return [trial for _, trial in sorted(near, key=operator.itemgetter(0))]


def _apart(candidate: Tensor, mistaken: Tensor) -> float:
    """The largest difference; NaN must match NaN, and an empty row may be 0 or NaN."""
    broken = ~mistaken.isfinite()
    if (candidate.isfinite() & broken).any():
        return math.inf
    empty = (mistaken == 0).all(dim=-1, keepdim=True) & candidate.isnan().all(dim=-1, keepdim=True)
    distance = (candidate - mistaken).abs().masked_fill(broken | empty, 0.0)
    return math.inf if distance.isnan().any() else float(distance.max())


# Fitted numbers.


def _fitted(known: list[Mistake], evidence: list[Evidence]) -> list[Trial]:
    """The mistakes with a free number that explain the outputs, with the fitted number, and the keys that queries see.

    Numbers are fitted where the output is wrong, and must hold for every probe.
    """
    if not all(each.observed["output"].isfinite().all() for each in evidence):
        return []
    wrong, trials = next(each for each in evidence if each.is_wrong("output")), []
    for mistake in (*(_fit(each, wrong) for each in known), _interval(wrong)):
        if mistake is None:
            continue
        trial, is_explained = Trial(mistake), True
        for each in evidence:
            trial.compare(each, ["output"])
            observed, expected = each.observed["output"], each.expected["output"]
            rest = (observed - each.output(mistake)).square().sum()
            is_better = rest <= (1 - EXPLAINED) * (observed - expected).square().sum()
            is_explained &= bool(is_better) or not each.is_wrong("output")
        if is_explained and trial.worst <= MATCH and not trial.is_idle:
            trials.append(trial)
    return trials


def _fit(mistake: Mistake, each: Evidence) -> Mistake | None:
    """The mistake with the number nearest to the candidate's output, by Gauss-Newton; None if none is near."""
    assert mistake.fit is not None
    observed, number = each.observed["output"], 1.0
    error = (observed - each.expected["output"]).square().sum()
    if (observed - each.output(mistake.fit(number))).square().sum() > WORSE * error:
        return None
    for _ in range(MOST_FITS):
        size = max(1.0, abs(number))
        step = 1e-4 * size
        below, here, above = (each.output(mistake.fit(near)) for near in (number - step, number, number + step))
        slope = (above - below) / (2 * step)
        moved = float(((observed - here) * slope).sum() / slope.square().sum())
        number += moved
        if not abs(number) <= MOST_TIMES:  # rejects NaN too
            return None
        if abs(moved) <= 1e-7 * size:  # the resolution of float32
            break
    return mistake.fit(number)


def _interval(each: Evidence) -> Mistake | None:
    """The mistake that a query sees another, contiguous range of keys, derived from the output of a few rows.

    For each row, find the range of keys whose softmax reproduces its output. The first and last keys of several rows
    show whether they are relative to the query, or the same for all.
    """
    workload, rows, book = each.reference.workload, each.rows, each.book(torch.float64)
    if workload.sinks != "none" or workload.kv_len > 2 * SHORT_LEN or len(rows) < FITTED_ROWS:
        return None
    scores, value, length = book.mask.changed(book.right["scores"])[:1], book.right["value"][:1], workload.kv_len
    first, past = torch.triu_indices(length + 1, length + 1, offset=1)
    ends = []
    for place in torch.linspace(1, len(rows) - 1, FITTED_ROWS).long().tolist():
        powers = (scores[:, :, place] - scores[:, :, place].amax(dim=-1, keepdim=True)).exp()[..., None]  # (1,H,S,1)
        sums = pad((powers * pad(value, (0, 1), value=1.0)).cumsum(dim=2), (0, 0, 1, 0))
        mixed = sums[:, :, past] - sums[:, :, first]  # (1,H,pairs,V+1): the last column is the sum of the powers
        answer = mixed[..., :-1] / mixed[..., -1:]
        answer = answer if workload.scope == "attention" else oracle.output(answer, book.inputs.weights)
        apart = (answer - each.observed["output"][:1, ..., place : place + 1, :]).abs()
        by_pair = apart.transpose(-2, 0).flatten(1).amax(dim=1)
        best = int(by_pair.argmin())
        if not float(by_pair[best]) <= MATCH * each.reference.tolerance("output"):
            return None
        ends.append((int(rows[place]), int(first[best]), int(past[best]) - 1))
    left = {query - start for query, start, _ in ends if start > 0} or {length}
    right = {end - query for query, _, end in ends if end < length - 1} or {length}
    if len(left) > 1 or len(right) > 1:
        return None
    (before,), (after,) = left, right
    start = "key 0" if before == length else f"key i{-before:+d}" if before else "key i"
    end = "the last key" if after == length else f"key i{after:+d}" if after else "key i"
    words = f"query i sees {start} to {end}, where the mask is {workload.mask}"

    def seen(mask: oracle.RowMask) -> Tensor:
        ahead = mask.keys - mask.queries
        return ((-before <= ahead) & (ahead <= after)).expand_as(mask.seen)

    return wrong("window_of_its_own", words, masked_scores=partial(showing, seen=seen))


def _by_rounding(known: Sequence[Mistake], evidence: list[Evidence]) -> list[Mistake]:
    """The roundings whose errors add up to the candidate's, in the order of the steps; none if they do not.

    Many errors have the size of a rounding; only the error of that very rounding is large and small in the same places.
    """
    wrong = next(each for each in evidence if each.is_wrong("output"))
    observed, expected = wrong.observed["output"], wrong.expected["output"]
    if not known or not observed.isfinite().all():
        return []
    error = (observed - expected).flatten()
    rounded = torch.stack([(wrong.output(each, wrong.own_dtype) - expected).flatten() for each in known], dim=-1)
    chosen, explained = _pursuit(rounded, error)
    sizes, size = rounded.norm(dim=0), float(error.norm())
    shares = (rounded.T @ error).abs() / (sizes * size).clamp(min=SMALLEST)
    is_enough = len(error) >= LEAST_VALUES and explained >= ROUNDING_EXPLAINED
    # A much larger error matches by chance.
    is_of_size = size <= ROUNDING_SPAN * float(sizes[chosen].sum())
    if is_enough and is_of_size and float(shares.max()) >= ROUNDING_CORRELATION:
        return [known[place] for place in sorted(chosen)]
    is_small = size <= ROUNDING_SPAN * float(sizes.max())
    is_coarse = torch.equal(observed.bfloat16().double(), observed)
    if not (is_small and is_coarse) or torch.equal(expected.bfloat16().double(), expected):
        return []
    # Sums in another order have other errors, but all results are bfloat16 numbers.
    sums = [mistake for mistake in known if mistake.name == "bfloat16_sums"]
    return [replace(each, words="the sum over the keys is accumulated in bfloat16") for each in sums[:1]]


def _pursuit(columns: Tensor, target: Tensor) -> tuple[list[int], float]:
    """Greedily choose columns (n, m) whose weighted sum explains most of the target (n,); return them and the share.

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
    random = next((rule for rule in wrong.notes if rule.rule == "repeatable"), None)
    stale = next((rule for rule in wrong.broken_rules if rule.rule == STALE), None)
    failing = next((each.reference for each in evidence if each.is_wrong("output")), None)
    found = Finding(UNKNOWN)
    if failing is None:
        names = sorted({name for each in evidence for name in each.names if each.is_wrong(name)})
        words = f"{UNKNOWN} The output is right, the backward pass is not ({', '.join(names)})."
        found = Finding(words, (), "backward pass")
    elif failing.workload.scope == "attention" and len(failing.rows) == failing.workload.seq_len:
        with contextlib.suppress(Exception):  # a candidate may fail on unit vectors
            found = describe_weights(implementation, failing, is_random=random is not None)
    if random is not None and not found.names and found.step != "weights":
        words = f"Is dropout, or something else random, active in evaluation? On equal inputs {random.found}."
        return Finding(words, tuple(sorted(RANDOM)), "weights")
    if random is not None and not found.names:
        found = replace(found, words=f"Something random is active: on equal inputs {random.found}. {found.words}")
    if stale is not None:
        words = f"{stale.found[0].upper()}{stale.found[1:]} (rule: {STALE}). {found.words}"
        return Finding(words, (RULE_MISTAKES[STALE],), found.step)
    return found


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
    query, key, value = oracle.heads(workload, reference.drawn, rows)
    right, like = oracle.weights(query, key, mask), value.to(inputs.tensors["query"])
    actual = recover_weights(attend, like).double().cpu()
    is_lost = (actual == 0) & (right > SMALL_WEIGHT)
    if is_random and is_lost.any():
        factor = float((actual / right)[(right > SMALL_WEIGHT) & ~is_lost].median())
        name, how = ("in_evaluation", f"multiplied by {factor:.2f}")
        if abs(factor - 1) < CLOSE / 2:
            name, how = ("without_rescaling", "as they were, without rescaling")
        share = float(is_lost.double().sum() / (right > SMALL_WEIGHT).sum())
        words = f"It looks as if dropout is active in evaluation: {share:.0%} of the weights are 0, the others {how}."
        return Finding(f"{words} First step that differs: weights.", (f"dropout_{name}",), "weights")
    apart, place = differences(actual, right)
    if float(apart.max()) <= WEIGHT_ROUNDINGS * torch.finfo(inputs.weights.query.dtype).eps:
        return Finding(f"{UNKNOWN} On these queries and keys its weights are right: the values are not.", (), "context")
    batch, head, row, column = place
    actual_words, right_words = _distinct(float(actual[place]), float(right[place]))
    facts = [
        f"query {row} gives key {column} {actual_words} where {right_words} is right (batch row {batch}, head {head})"
    ]
    if empty := int(((actual == 0).all(dim=-1) & is_lost.any(dim=-1)).sum()):
        facts.append(f"{empty} queries give no key any weight")
    sums = actual.sum(dim=-1)
    low, high = float(sums.min()), float(sums.max())
    if max(abs(low - 1), abs(high - 1)) > CLOSE:
        facts.append(f"a query's weights add up to {low:.3g} to {high:.3g}, not 1")
    leaked = float(actual.where(~mask.seen, 0.0).abs().max())
    if leaked > SMALL_WEIGHT:
        facts.append(f"hidden keys get up to {leaked:.3g}")
    return Finding(f"{UNKNOWN} Its weights, seen from outside: {'; '.join(facts)}.", (), "weights")


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
