"""Diagnose a wrong candidate in words: the known mistake that explains its answers, and the first step that differs.

A candidate is the implementation under test. Its grade does not depend on the diagnosis. Simple explanations come
first: a convention (an accepted difference from SDPA, such as NaN for a query that sees no key), a constant factor, or
computation in float32. Then every mistake of the catalogue is computed on one probe (kind of inputs) that shows the
error, and the nearest mistakes are compared with the candidate on all probes, within the tolerance of the check. If
some rows are right, a mistake may explain only the wrong ones. If no mistake fits, the candidate's weights are
recovered from its outputs and described. Shapes as in the contract; R query rows.
"""

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from torch import Tensor

from attnbench.checking import oracle, steps
from attnbench.checking.backward_mistakes import backward_catalogue
from attnbench.checking.calls import Caller, call_on, caller_of
from attnbench.checking.mistakes import catalogue
from attnbench.checking.page_mistakes import page_mistakes
from attnbench.checking.probes import VacuousError
from attnbench.checking.reference import (
    Reference,
    References,
    apply_empty_row_convention,
    call_candidate,
    distance,
    is_half,
    largest,
    output_error,
    reference_for_probe,
    roundings,
)
from attnbench.checking.rules import ANOTHER_BATCH, POOLS
from attnbench.checking.steps import Mistake
from attnbench.contract import Implementation
from attnbench.contract.pages import ZEROS
from attnbench.storage.records import CONVENTIONS, FLOAT32, Agreement, CheckVerdict
from attnbench.workloads.batch import SAME
from attnbench.workloads.workload import Workload

SHORT_LEN = 67
MOST_HEADS = 4
MOST_ROWS = 2
MOST_SCORES = 2**16
"""A workload with more scores (B * H * T * S) is diagnosed at length SHORT_LEN, with at most MOST_HEADS heads and
MOST_ROWS batch rows if possible. The full workload is used only if the candidate is right at the short workload."""
MOST_KEYS = 2**13
"""With more keys in the diagnosed workload, weights are not described, and only mistakes about pages are tried."""
LEAST_ROWS = 8  # fewest output rows that `cut` keeps and `_by_feature` fits
SHORTLIST = 24  # number of mistakes, the nearest on one probe, that are compared on all probes
MOST_EXTENTS, MOST_ROWS_OF_PART = 3, 0.9
"""The most tensors whose wrong part is described, and the largest share of a tensor's rows that counts as a part."""
MOST_HONEST = 0.6
"""Largest error of correct code, as a share of its limit. A wrong part is described if errors elsewhere are smaller."""
MOST_GAPS = 0.7  # wrong rows are called "from row n on" if more than this share of these rows is wrong
MATCH = 4.0
"""A mistake explains a tensor whose distance from the mistake's answer is at most this many tolerances."""
CLOSER = 0.5  # largest ratio of a tensor's distance from a mistake's answer to its distance from the right answer
EXPLAINED = 0.9  # a factor must explain at least this share of the sum of squared errors
OF_FEATURES = 0.01
"""The largest share of the sum of squared errors that `_by_feature` may leave unexplained."""
HUGE = 1e6  # numbers this many times larger than the largest right one count as uninitialized memory
LEAST_NEAR = 0.02  # if all errors are below this share of a dtype's tolerance, they do not come from that dtype
LEAST_NEAR_IN_FLOAT64 = 0.001
"""LEAST_NEAR for float32, if nothing else explains errors in float64. If code computes only one step in float32, such
as the softmax, its errors are far below those of float32 throughout, and far above those of float64."""
SMALLEST = torch.finfo(torch.float64).tiny
STALE, UNKNOWN, FLOAT32_INSIDE = "outputs apart", "No known mistake explains it.", "float32_inside"
STALE_MISTAKE = "stale_output_buffer"  # the mistake's name
UNUSED_NAN = (
    "NaN from an unused slot or page of the cache reaches the output, which is right with zeros there. A weight of 0 "
    "does not help, because 0 * NaN is NaN: leave out the values beyond the length, or set them to 0."
)
RULE_MISTAKES = {"inputs kept": "input_changed", STALE: STALE_MISTAKE, "layouts": "read_as_contiguous"}
RULE_MISTAKES |= {ANOTHER_BATCH: "kept_plan", POOLS: "read_as_contiguous"}
"""The mistake that a broken rule indicates, by the rule's name."""
STEPS = {"output": "context", "query": "scores", "key": "heads", "value": "heads", "sinks": "weights"}
"""The step that is probably wrong if an output, or the gradient of an operand, is wrong by a constant factor."""
RANDOM = {"dropout_in_evaluation", "dropout_without_rescaling"}  # mistakes whose answers differ between equal calls
SLIGHT = 2.0  # errors of at most this many tolerances may be roundings in half precision
SMALL_WEIGHT = 1e-3  # smaller right weights, and smaller weights of hidden keys, are ignored
CLOSE = 0.05  # a query's weights are right if their sum differs from 1 by at most this
WEIGHT_ROUNDINGS = 16  # weights within this many roundings of the right ones are right
MOST_OFF = 0.01  # a weight that is further off than this is wrong in any dtype
MOST_IN_SUM = 0.05  # a query's weights are wrong if their errors add up to more than this
AXES = {
    1: ("number",),
    2: ("row", "column"),
    3: ("batch row", "row", "column"),
    4: ("batch row", "head", "row", "column"),
}
"""Names of a tensor's axes, by the number of axes."""


@dataclass(frozen=True)
class Finding:
    """An explanation in complete sentences, with the names of mistakes and the first step that differs."""

    words: str
    names: tuple[str, ...] = ()
    step: str = ""


def finding(words: str, names: Iterable[str], step: str, more: str = "", *, is_backward: bool = False) -> Finding:
    """Create a finding: the sentences "It looks as if `words`." and `more`, and the first step that differs."""
    first = f"the backward pass of {step}" if is_backward else step
    sentence = f"It looks as if {words}.{more} First step that differs: {first}.".replace("if ,", "if,", 1)
    return Finding(sentence, tuple(dict.fromkeys(names)), step)


class Evidence:
    """A candidate's answers to one probe (kind of inputs), with the right answers and their tolerances."""

    def __init__(self, caller: Caller, reference: Reference, convention: str | None = None) -> None:
        """Call the candidate; its exceptions propagate.

        `convention` names its answer to queries that see no key (a key of CONVENTIONS, or "" for none), if other inputs
        have already shown it. Unused slots of a key/value cache contain 0 instead of NaN in this call, so that the
        output is finite even if the code reads them.
        """
        seen, here = apply_empty_row_convention(call_candidate(caller, reference, ZEROS), reference, convention)
        _, wider = output_error(seen.output, reference)
        if wider is not reference:  # a row of a long output is wrong, and `reference` does not compare it
            reference, (seen, here) = (
                wider,
                apply_empty_row_convention(call_candidate(caller, wider, ZEROS), wider, convention),
            )
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
        # If the output is not finite, mistakes are computed in the candidate's dtype, and gradients are not compared.
        self.dtype = torch.float64 if is_finite else self.own_dtype
        self.names = [*self.observed] if is_finite else ["output"]

    def is_wrong(self, name: str) -> bool:
        """Return whether any error of the tensor `name` exceeds its limit."""
        return bool(self.beyond[name].any())

    def is_off(self, name: str, share: float) -> Tensor:
        """Mark the elements of the tensor `name` with errors above `share` times their limits, in a boolean tensor."""
        return ~((self.observed[name] - self.expected[name]).abs() <= share * self.limits[name])

    def distance(self, mistake: Mistake, region: Tensor | None = None, *, is_quick: bool = False) -> float:
        """Return the largest difference between the candidate's and the mistake's outputs, divided by the tolerance.

        The mistake's output is computed in float64 and in the candidate's dtype. The smaller distance counts, and the
        difference between the two outputs widens the tolerance. `region`, boolean (B, H, R) or (B, R), marks the rows
        to compare. If `is_quick`, only float64 is used, and the result is infinite unless the mistake's output is
        clearly nearer than the right one.
        """
        self.reference.on_step()
        answers = partial(self.reference.answers_of, mistake, rows=self.rows, has_gradients=False)
        exact_ones = answers(self.dtype)
        own_ones = exact_ones if is_quick else answers(self.own_dtype)
        every, place = (self.observed, self.expected, exact_ones, own_ones), ... if region is None else region
        observed, expected, exact, own = ((each["output"] / self.limits["output"])[place] for each in every)
        one = torch.finfo(self.own_dtype).eps / 2 * roundings(self.reference.workload, "output", 0.0)
        limit = 2 * _apart(own, exact) + one * float(exact.nan_to_num().abs().max()) + 1
        away = min(_apart(observed, exact), _apart(observed, own)) / limit
        return away if away <= CLOSER * _apart(observed, expected) or not is_quick else math.inf

    def explains_gradients(self, mistake: Mistake, wrong: Iterable[str]) -> bool:
        """Return whether a mistake explains every tensor: each is near the mistake's tensor of the same name.

        A tensor that is named in `wrong` and has errors beyond its limits must also be much nearer to the mistake's
        tensor than to the right one.
        """
        self.reference.on_step()
        answers = partial(self.reference.answers_of, mistake, rows=self.rows)
        exact, own = answers(), dict[str, Tensor]()
        one = torch.finfo(self.own_dtype).eps / 2
        for name in self.names:
            observed, expected, like = (
                each[name] / self.limits[name] for each in (self.observed, self.expected, exact)
            )
            apart = _apart(observed, like)
            if name in wrong and self.is_wrong(name) and not apart <= CLOSER * _apart(observed, expected):
                return False
            if apart > MATCH:
                own = own or answers(self.own_dtype)
                rounded = own[name] / self.limits[name]
                count = roundings(self.reference.workload, name, 0.0)
                limit = 2 * _apart(rounded, like) + one * count * float(like.nan_to_num().abs().max()) + 1
                if min(apart, _apart(observed, rounded)) > MATCH * limit:
                    return False
        return True


def explain(
    references: References, candidate: Implementation | Caller, wrong: Agreement, rejects: Collection[str] = ()
) -> Agreement:
    """Return the result of a failed check (`wrong`) with a diagnosis; the candidate is called again and may raise.

    If the only trouble is that float64 inputs are computed in float32, the result has the convention (accepted
    difference) FLOAT32 instead of a diagnosis, unless a rule is broken or `rejects` contains FLOAT32.
    """
    caller = caller_of(candidate)
    if wrong.broken_rules and all(tensor.agrees for _, tensor in wrong.tensors()):
        rule = wrong.broken_rules[0]
        known = RULE_MISTAKES.get(rule.rule)
        result = Finding(f"{rule.found} (rule: {rule.rule})", (known,) if known else ())
    else:
        evidence = gather(caller, references.by_probe, references.seed)
        is_right = not any(each.is_wrong(name) for each in evidence for name in each.names)
        has_8_bits = references.workload.cache_dtype != SAME  # with few heads, wrong scales look like a constant factor
        if is_right and references.workload.page_size:
            explained: Finding | None = Finding(UNUSED_NAN, ("unused_nan",), "context")
        elif (explained := (_known(evidence) if has_8_bits else None) or _closed_form(evidence)) is None:
            place = extent(evidence)
            cut(evidence)
            explained = _known(evidence) or _backward(evidence) or _unwritten(evidence)
            explained = explained or _unknown(caller, evidence, wrong)
            if place and place.split(" only", 1)[1].strip(" .") not in explained.words:
                explained = replace(explained, words=f"{place} {explained.words}")
        assert explained is not None
        if explained.names == (FLOAT32_INSIDE,) and not wrong.broken_rules and FLOAT32 not in rejects:
            return msgspec.structs.replace(wrong, conventions=(*wrong.conventions, FLOAT32))
        result = replace(explained, words=f"{explained.words} {describe(wrong)}")
    return msgspec.structs.replace(wrong, diagnosis=result.words, mistakes=result.names, step=result.step)


def gather(caller: Caller, references: dict[str, Reference], seed: int) -> list[Evidence]:
    """Collect the candidate's answers to all probes (kinds of inputs), at a simpler workload if it is wrong there.

    A simpler workload is also faster. If the candidate is right there, use the full workload, and only probes that
    compare the same rows as the first one with a wrong output.
    """

    def gathered(answered: Iterable[Reference]) -> list[Evidence]:
        evidence: list[Evidence] = []
        for reference in answered:
            with contextlib.suppress(VacuousError):  # correct code overflows there, too
                evidence.append(Evidence(caller, reference, evidence[0].convention if evidence else None))
        return evidence

    first = next(iter(references.values()))
    for simple in simpler(first.workload):
        with contextlib.suppress(Exception):  # the candidate may not support it
            evidence = gathered(reference_for_probe(simple, probe, seed, first.on_step) for probe in references)
            if any(each.is_wrong(name) for each in evidence for name in each.names):
                return evidence
    every = gathered(references.values())
    worst = next((each for each in every if each.is_wrong("output")), every[0])
    return [each for each in every if torch.equal(each.rows, worst.rows)]  # probes may have different rows


def extent(evidence: list[Evidence]) -> str:
    """Describe which part of the output, or of gradients, is wrong on some inputs; return "" if none is clear."""
    sentences = []
    for name in _wrong_names(evidence):
        these = [each for each in evidence if name in each.names]
        marked = torch.stack([each.beyond[name] for each in these]).any(dim=0)
        near = torch.stack([each.is_off(name, MOST_HONEST) for each in these]).any(dim=0)
        if (where := _part(marked, these[0], name)) and _part(marked | near, these[0], name) == where:
            sentences.append(f"the {name} is wrong only{where}")
    words = "; ".join(sentences[:MOST_EXTENTS])
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def _part(marked: Tensor, seen: Evidence, name: str) -> str:
    """Describe the marked batch rows, heads and rows of a tensor; return "" for a whole tensor or no clear part."""
    if marked.dim() == 1 or not marked.any():
        return ""
    axes, lines = AXES[marked.dim()][:-1], marked.any(dim=-1)  # (B,H,R), (B,R), or (R,)
    region = _region(lines)
    if "head" in axes:
        blocks = lines.flatten(end_dim=1).any(dim=-1)  # (B*H,)
        first, num_heads = int(blocks.nonzero()[0]), lines.shape[1]
        if first % num_heads and first + num_heads < len(blocks) and blocks[first:].all():
            where = f"head {first % num_heads} of batch row {first // num_heads}"
            return f" from {where} on (block {first} of {len(blocks)})"
    words = ""
    for axis, chosen in zip(axes, region, strict=True):
        size, first, last = lines.shape[axes.index(axis)], int(chosen[0]), int(chosen[-1])
        is_end = first > 0 and last == size - 1 and len(chosen) > size * MOST_GAPS * (1 - first / size)
        is_range = len(chosen) == last - first + 1
        is_part = (is_range or is_end) and last - first + 1 <= MOST_ROWS_OF_PART * size
        if len(chosen) < size and (axis in {"batch row", "head"} or is_part):
            words += _where([torch.arange(first, size) if is_end and axis == "row" else chosen], seen, name, (axis,))
    return words


def cut(evidence: list[Evidence]) -> None:
    """Reduce long wrong outputs in `evidence`, in place, to the worst rows over all probes and evenly spaced rows."""
    workload, num_rows = evidence[0].reference.workload, len(evidence[0].rows)
    most = max(LEAST_ROWS, MOST_SCORES // (workload.batch_size * workload.num_heads * workload.kv_len))
    if num_rows > most and any(each.is_wrong("output") for each in evidence):
        apart = torch.stack([(each.observed["output"] - each.expected["output"]).abs() for each in evidence])
        worst = apart.nan_to_num(torch.inf).movedim(-2, 0).flatten(1).amax(dim=1).topk(most // 2).indices
        places = torch.cat([worst, torch.linspace(0, num_rows - 1, most // 2).long()]).unique()
        for each in evidence:
            each.rows = each.rows[places]
            for tensors in (each.observed, each.expected, each.beyond, each.limits):
                tensors["output"] = tensors["output"].index_select(-2, places)


def simpler(workload: Workload) -> Iterator[Workload]:
    """Yield simpler workloads, simplest first: no projections, a short length, fewer heads, and fewer batch rows."""
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
    """Explain answers by float32 computation, factors, accepted differences or kept state; None if none fits."""
    if any(each.is_wrong(name) for each in evidence for name in each.names):
        return _float32_inside(evidence) or _factor(evidence) or _by_feature(evidence)
    if conventions := {each.convention: None for each in evidence if each.convention}:
        words = ("; ".join(map(CONVENTIONS.__getitem__, conventions))).capitalize()
        kind = next(iter(conventions)).removesuffix("_gradient")
        return Finding(f"{words}.", (f"{kind}_where_nothing_is_seen",), "weights")
    if lost := {name: None for each in evidence for name in each.not_finite}:
        words = f"The {', '.join(lost)} is not finite where it is 0: each query has all its weight on one key."
        return Finding(words, (), "weights")
    words = "It looks as if something is kept from an earlier call: called once more, the candidate is right."
    return Finding(words, (STALE_MISTAKE,), "output")


def _float32_inside(evidence: list[Evidence], least: float = LEAST_NEAR) -> Finding | None:
    """Return a finding if computing in float32 explains the errors in float64, else None; `least` as in `_narrower`."""
    if evidence[0].reference.workload.dtype != "float64" or not _narrower(evidence, "float32", least=least):
        return None
    return Finding("It looks as if it computes in float32 whatever the dtype of its inputs.", (FLOAT32_INSIDE,))


def _narrower(evidence: list[Evidence], *dtypes: str, least: float = LEAST_NEAR) -> str:
    """Return the first of `dtypes`, all narrower than the workload's, that explains the errors; "" if none does.

    A dtype explains errors if all are within its tolerances, and one is at least `least` times its tolerance.
    """
    for dtype in () if is_half(evidence[0].reference.workload) else dtypes:
        is_right, nearest = True, 0.0
        for each in evidence if is_right else ():
            workload, drawn = msgspec.structs.replace(each.reference.workload, dtype=dtype), each.reference.drawn
            with contextlib.suppress(ValueError):  # correct code overflows in that dtype
                same = {"rows": each.rows, "has_gradients": each.reference.has_gradients}
                narrow = Reference(workload, drawn, each.reference.seed, **same)  # type: ignore[arg-type]
                shapes = {name: tensor.shape for name, tensor in each.observed.items() if name in each.names}
                judges = {n: each for n, each in narrow.tolerances.items() if each.expected.shape == shapes.get(n)}
                errors = [judge.judge(each.observed[name]) for name, judge in judges.items()]
                is_right &= all(error.agrees for error in errors)
                nearest = max([nearest, *(error.ratio or 0.0 for error in errors)])
        if is_right and nearest >= least:
            return dtype
    return ""


def _wrong_names(evidence: list[Evidence]) -> list[str]:
    """Return ["output"] if the output is wrong on any probe, or else the names of the wrong gradients."""

    def is_wrong_somewhere(name: str) -> bool:
        return any(name in each.names and each.is_wrong(name) for each in evidence)

    wrong = list(filter(is_wrong_somewhere, evidence[0].names))
    return ["output"] if "output" in wrong else wrong


def _factor(evidence: list[Evidence]) -> Finding | None:
    """Return a finding if the wrong part of each wrong tensor is a constant times the right values; else None."""
    sentences, kinds, step = [], [], "context"
    of_tokens = {"gradient of x", "gradient of context"}  # they follow from the other gradients
    names = [name for name in _wrong_names(evidence) if name not in of_tokens]
    for name in names:
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
    """Return (factor of a tensor's wrong part, the part in words); None if no factor fits. Factor 0: the part is 0."""
    these = [each for each in evidence if name in each.names]
    if not all(each.observed[name].isfinite().all() for each in these):
        return None
    region = _region(torch.stack([each.beyond[name] for each in these]).any(dim=0))
    inside = torch.meshgrid(*region, indexing="ij")
    limits = [each.reference.tolerance(name) or SMALLEST for each in these]
    in_limits = list(zip(these, limits, strict=True))
    observed = torch.stack([each.observed[name][inside] / limit for each, limit in in_limits])
    expected = torch.stack([each.expected[name][inside] / limit for each, limit in in_limits])
    factor = float((observed * expected).sum() / expected.square().sum()) if observed.any() else 0.0
    rest, error = ((observed - times * expected).square().sum() for times in (factor, 1.0))
    is_like = not factor or rest <= (1 - EXPLAINED) * observed.square().sum()
    is_near = largest(observed, factor * expected) <= MATCH / 2 * max(1.0, abs(factor))
    if not (is_like and is_near and rest <= (1 - EXPLAINED) * error):
        return None
    if not any(each.observed[name].any() for each in these):
        return 0.0, ""
    return factor, _where(region, these[0], name)


def _unwritten(evidence: list[Evidence]) -> Finding | None:
    """Return a finding if exactly the wrong rows contain huge or non-finite numbers (unwritten memory); else None."""
    for name in _wrong_names(evidence):
        these = [each for each in evidence if name in each.names]
        most = HUGE * max(float(each.expected[name].abs().max()) for each in these)
        is_old = torch.stack([~(each.observed[name].abs() <= most) for each in these]).any(dim=0)
        is_wrong = torch.stack([each.beyond[name] for each in these]).any(dim=0)
        rows = [is_rows.movedim(-2, 0).flatten(1).any(dim=1) for is_rows in (is_old, is_wrong) if is_rows.dim() > 2]  # noqa: PLR2004
        if rows and rows[0].any() and not rows[0].all() and torch.equal(*rows):
            where = _where([rows[0].nonzero().flatten()], these[0], name, ("row",))
            step = STEPS.get(name.removeprefix("gradient of "), "scores")
            words = f"the {name} was never written{where}: there it holds what memory held"
            return finding(words, [f"{name.replace(' ', '_')}_unwritten"], step, is_backward=name != "output")
    return None


def _region(marked: Tensor) -> list[Tensor]:
    """Return for each axis of a boolean tensor the indices at which some element is True."""
    every = marked.nonzero()
    return [every[:, dim].unique() for dim in range(marked.dim())]


def _by_feature(evidence: list[Evidence]) -> Finding | None:
    """Return a finding if a module multiplies each column of the joined heads (H*V) by its own factor; else None."""
    out, bias = evidence[0].reference.drawn.weights.out, evidence[0].reference.drawn.weights.out_bias
    these = [each for each in evidence if each.is_wrong("output") and each.reference.workload.scope == "module"]
    if not these or out is None or out.shape[0] != out.shape[1]:
        return None
    shift = 0.0 if bias is None else bias
    observed = torch.cat([each.observed["output"] for each in these]).flatten(end_dim=1) - shift  # (B*R,D)
    expected = torch.cat([each.expected["output"] for each in these]).flatten(end_dim=1) - shift
    if not observed.isfinite().all() or len(observed) < LEAST_ROWS:
        return None
    heads = torch.linalg.solve(out, expected.T).T  # (B*R,H*V)
    squares = (out.T @ out) * (heads.T @ heads)  # least squares: the observed is (factors * heads) @ out.T
    factors = torch.linalg.pinv(squares, hermitian=True) @ (heads * (observed @ out)).sum(dim=0)
    rest, error = (observed - (factors * heads) @ out.T).square().sum(), (observed - expected).square().sum()
    if rest > OF_FEATURES * error:
        return None
    low, high = float(factors.min()), float(factors.max())
    if math.isclose(low, high, rel_tol=1e-3):
        words = f"the heads' outputs are {float(factors.mean()):.5g} times what they should be"
        return finding(words, ["output_factor"], "context")
    words = f"each number of the heads' outputs is multiplied by one of its own, {low:.3g} to {high:.3g}, before the "
    words += "output projection: by a gate, or by a buffer that is drawn when the module is made"
    return finding(words, ["features_scaled"], "context")


def _where(region: list[Tensor], seen: Evidence, name: str, axes: tuple[str, ...] = ()) -> str:
    """Describe a region of a tensor, given by indices along `axes` (default: all); return "" for the whole tensor."""
    shape, words = seen.observed[name].shape, ""
    every = AXES[len(shape)]
    for axis, chosen in zip(axes or every, region, strict=True):
        size, count, first = shape[every.index(axis)], len(chosen), int(chosen[0])
        places = seen.rows[chosen] if name == "output" and axis == "row" else chosen
        if count == 1 < size:
            words += f" in {axis} {places[0]}"
        elif count == size - first < size:
            words += f" from {axis} {places[0]} on"
        elif int(chosen[-1]) - first + 1 == count < size:
            words += f" in {axis}s {places[0]} to {places[-1]}"
        elif count < size:
            some = ", ".join(map(str, places[:4].tolist()))
            words += f" in {count} of {size} {axis}s ({some}{', ...' * (count > 4)})"  # noqa: PLR2004
    return words


def _known(evidence: list[Evidence]) -> Finding | None:
    """Return a finding if known mistakes explain the output or, if other rows are right, its wrong rows; else None."""
    if not any(each.is_wrong("output") for each in evidence):
        return None
    workload, where = evidence[0].reference.workload, ""
    mistakes = [*(catalogue if workload.kv_len <= MOST_KEYS else page_mistakes)(workload)]
    matches = match(evidence, mistakes)
    rows = torch.stack([each.beyond["output"].any(dim=-1) for each in evidence]).any(dim=0)  # (B,H,R) or (B,R)
    if not matches and rows.any() and not rows.all() and evidence[0].observed["output"].isfinite().all():
        matches = match(evidence, mistakes, rows)
        where = _where(_region(rows), evidence[0], "output", AXES[rows.dim() + 1][:-1])
    if not matches:
        return None
    first, *others = matches
    is_of_functions = "lambda f, q" in first.declare and workload.scope == "module"
    more = f" If this is meant, write {first.declare}." * bool(first.declare and not is_of_functions)
    if also := dict.fromkeys(each.words for each in others if each.name != first.name):
        more += f" On this workload that cannot be distinguished from: {'; '.join(also)}."
    words = f",{where}, {first.words}" if where else first.words
    return finding(words, (each.name for each in matches), first.step, more)


def _backward(evidence: list[Evidence]) -> Finding | None:
    """Return a finding if the output is right and one backward-pass mistake explains all gradients; else None."""
    if "output" in (names := _wrong_names(evidence)):
        return None
    these = sorted(evidence, key=lambda each: not any(map(each.is_wrong, each.names)))
    every = backward_catalogue(evidence[0].reference.workload)

    def explains_all(mistake: Mistake) -> bool:
        return all(each.explains_gradients(mistake, names) for each in these)

    found = list(filter(explains_all, every))
    if not found:
        return None
    first, *others = found
    also = dict.fromkeys(each.words for each in others if each.words != first.words)
    more = f" On this workload that cannot be distinguished from: {'; '.join(also)}." if also else ""
    return finding(first.words, (each.name for each in found), first.step, more)


def match(evidence: list[Evidence], mistakes: Iterable[Mistake], region: Tensor | None = None) -> list[Mistake]:
    """Return the mistakes that explain a wrong output about as well as the best one, best first.

    With `region`, boolean (B, H, R) or (B, R), only its True rows of the output are compared.
    """
    has_all_rows = all(len(each.rows) == each.reference.workload.seq_len for each in evidence)
    first = next(each for each in evidence if each.is_wrong("output"))
    possible = [each for each in mistakes if has_all_rows or not each.needs_all_rows]
    near = {each: first.distance(each, region, is_quick=True) for each in possible}
    far: dict[Mistake, float] = {}
    for mistake in sorted(near, key=near.__getitem__)[:SHORTLIST]:
        far[mistake] = 0.0 if near[mistake] < math.inf else math.inf
        for each in evidence:
            if far[mistake] <= MATCH:
                far[mistake] = max(far[mistake], each.distance(mistake, region))
    best = min(far.values(), default=math.inf)
    limit = min(MATCH, max(1.0, 2 * best))
    return sorted((each for each in far if far[each] <= limit), key=far.__getitem__)


def _apart(candidate: Tensor, mistaken: Tensor) -> float:
    """Return the largest difference; NaN must match NaN, but a candidate's row of NaN may match a row of 0."""
    empty = (mistaken == 0).all(dim=-1, keepdim=True) & candidate.isnan().all(dim=-1, keepdim=True)
    return distance(torch.where(empty, mistaken, candidate), mistaken)


def _unknown(caller: Caller, evidence: list[Evidence], wrong: Agreement) -> Finding:
    """Describe a failure that no known mistake explains: by the candidate's weights, broken rules and notes."""
    if not extent(evidence) and (inside := _float32_inside(evidence, LEAST_NEAR_IN_FLOAT64)):
        return inside
    random = next((rule.found for rule in wrong.notes if rule.rule == "repeatable"), "two calls give other outputs")
    if not _differs(caller, evidence[0].reference):
        random = ""
    stale = next((rule for rule in wrong.broken_rules if rule.rule == STALE), None)
    failing = next((each.reference for each in evidence if each.is_wrong("output")), None)
    is_finite = all(bool(each.observed[name].isfinite().all()) for each in evidence for name in each.names)
    result = Finding(UNKNOWN)
    with contextlib.suppress(Exception):  # a candidate may fail on further calls
        if random and (between := _between_calls(caller, evidence, wrong)):
            return between
    if failing is None:
        names = sorted({name for each in evidence for name in each.names if each.is_wrong(name)})
        words = f"{UNKNOWN} The output is right, the backward pass is not ({', '.join(names)})."
        ratios = [tensor.ratio or math.inf for _, tensor in wrong.tensors() if tensor.grade is CheckVerdict.wrong]
        most = max(ratios, default=math.inf)
        if most < SLIGHT and is_half(evidence[0].reference.workload):
            words = f"{UNKNOWN} Only the {', '.join(names)} is wrong, by at most {most:.3g} times the tolerance: "
            words += "something may keep too few digits in either pass, such as a sum in half precision."
        result = Finding(words, (), "backward pass")
    elif _shows_weights(failing):
        with contextlib.suppress(Exception):  # a candidate may fail on unit vectors
            result = describe_weights(caller, failing, is_random=bool(random))
    if random and not result.names:
        if result.step != "weights":
            words = f"Is dropout, or something else random, active in evaluation? On equal inputs {random}."
            return Finding(words, tuple(sorted(RANDOM)), "weights")
        result = replace(result, words=f"Something random is active: on equal inputs {random}. {result.words}")
    elif not result.names and is_finite and (kind := _narrower(evidence, "float16", "bfloat16")):
        hint = f"Its errors are within those of {kind}: is something computed in it?"
        result = replace(result, words=f"{result.words} {hint}")
    if stale is not None:
        words = f"{stale.found[0].upper()}{stale.found[1:]} (rule: {STALE}). {result.words}"
        return Finding(words, (STALE_MISTAKE,), result.step)
    return result


def _differs(caller: Caller, reference: Reference) -> bool:
    """Return whether equal calls differ by more than the tolerance (roundings depend on addresses), or fail."""
    try:
        one, other = (call_candidate(caller, reference).output.detach() for _ in range(2))
    except Exception:  # noqa: BLE001 - a candidate may fail on further calls
        return True
    return distance(one, other) > reference.tolerance("output")


def _between_calls(caller: Caller, evidence: list[Evidence], wrong: Agreement) -> Finding | None:
    """Explain why equal calls differ: by state kept from an earlier call, or by a race; None if neither fits."""
    reference, *others = [each.reference for each in evidence]
    if not others:
        return None

    def answer(to: Reference) -> Tensor:
        return call_candidate(caller, to).output.detach().double().cpu()

    first, second, third = (answer(reference) for _ in range(3))
    once = next((each for probe, each in wrong.tensors() if (probe, each.tensor) == ("normal", "output")), None)
    if not third.isfinite().all() and once is not None and once.error is not None:
        words = "NaN or Inf of an earlier call's inputs is still there: something is kept between calls, such as a "
        return Finding(f"{words}workspace that is never cleared.", (STALE_MISTAKE,), "output")
    limit = max(each.reference.tolerance("output") for each in evidence)
    one, other = second - first, third - second
    if distance(one, other) <= limit < float(one.abs().max()):
        words = "Each call adds to what an earlier one left: something is kept between calls, such as a workspace that "
        return Finding(f"{words}is never cleared.", (STALE_MISTAKE,), "output")
    answer(others[0])
    after = answer(reference)
    if others[0].tolerances["output"].judge(after.index_select(-2, others[0].rows)).agrees:
        return Finding("Each call gives the answer to an earlier call.", (STALE_MISTAKE,), "output")
    answer(others[0])
    if torch.equal(after, answer(reference)) and not torch.equal(after, third):
        words = "The answer follows the call before: something is kept between calls, such as a workspace or a buffer."
        return Finding(words, (STALE_MISTAKE,), "output")
    middle = torch.stack([first, second, third]).median(dim=0).values.index_select(-2, reference.rows)
    if reference.tolerances["output"].judge(middle).agrees:
        words = "Equal calls scatter around the right answer: a race, such as stores or additions that are not atomic."
        return Finding(words, ("race",), "output")
    return None


def _shows_weights(reference: Reference) -> bool:
    """Return whether `describe_weights` is possible, and fast enough: it makes about S / V calls."""
    workload = reference.workload
    has_all_rows = len(reference.rows) == workload.seq_len
    return workload.scope == "attention" and workload.kv_len <= MOST_KEYS and has_all_rows


def describe_weights(caller: Caller, reference: Reference, *, is_random: bool = False) -> Finding:
    """Recover the candidate's weights (B, H, T, S) on the reference's queries and keys, and describe their errors.

    `reference` has scope `attention` and all query rows. With `is_random`, weights of 0 are described as dropout.
    """
    workload = msgspec.structs.replace(reference.workload, direction="inference")
    inputs = reference.inputs

    def attend(value: Tensor) -> Tensor:
        call = call_on(inputs.map(lambda tensor: tensor.clone()), workload)
        return caller.call(replace(call, tensors=call.tensors | {"value": value})).output

    rows = torch.arange(workload.seq_len)
    mask = oracle.row_mask(workload, rows, inputs=reference.drawn.tensors)
    results = steps.walked(workload, reference.drawn, rows)
    right, like = results["weights"], reference.drawn.tensors["value"].to(inputs.tensors["query"])
    actual = oracle.weights(attend, like).double().cpu()
    is_lost, is_clear = actual == 0, right > SMALL_WEIGHT
    if is_random and (is_lost & is_clear).any():
        factor = float((actual / right)[is_clear & ~is_lost].median())
        is_rescaled = abs(factor - 1) >= CLOSE / 2
        share = float((is_lost & is_clear).sum() / is_clear.sum())
        how = f"multiplied by {factor:.2f}" if is_rescaled else "as they were, without rescaling"
        words = f"dropout is active in evaluation: {share:.0%} of the weights are 0, the others {how}"
        return finding(words, [f"dropout_{'in_evaluation' if is_rescaled else 'without_rescaling'}"], "weights")
    allowed = min(WEIGHT_ROUNDINGS * torch.finfo(inputs.weights.query.dtype).eps, MOST_OFF)
    apart = (actual - right).abs().nan_to_num(torch.inf)
    place = torch.unravel_index(apart.argmax(), apart.shape)
    in_sum = float(apart.sum(dim=-1).max())  # with many keys, each error is small
    if float(apart.max()) <= allowed and in_sum <= MOST_IN_SUM:
        words = f"{UNKNOWN} On these queries and keys its weights are right: their sum with the values is not."
        return Finding(words, (), "context")
    if workload.sinks == "none" and (known := _by_weights(actual, results, mask, allowed)):
        return known
    (batch, head, row, column), sums = map(int, place), actual.sum(dim=-1)
    low, high, leaked = float(sums.min()), float(sums.max()), float(actual.where(~mask.seen, 0.0).abs().max())
    facts = "query {} gives key {} {} where {} is right (batch row {}, head {})".format(
        row, column, *_distinct(float(actual[place]), float(right[place])), batch, head
    )
    if max(abs(low - 1), abs(high - 1)) > CLOSE:
        of_sums = f"a query's weights add up to {low:.3g} to {high:.3g}, not 1"
        if float((actual / sums[..., None].clamp(min=SMALLEST) - right).abs().max()) <= allowed:
            words = f"It looks as if the softmax divides by a wrong sum: {of_sums}, and are right but for that factor."
            return Finding(words + " Is the sum kept in half precision?" * is_half(workload), (), "weights")
        facts += f"; {of_sums}"
    facts += f"; hidden keys get up to {leaked:.3g}" * (leaked > SMALL_WEIGHT)
    return Finding(f"{UNKNOWN} Its weights, seen from outside: {facts}.", (), "weights")


def _by_weights(actual: Tensor, results: dict[str, Tensor], mask: oracle.RowMask, allowed: float) -> Finding | None:
    """Return a finding if the weights (B, H, T, S) fit scaled scores, or right scores under another mask; else None."""
    seen, masked = actual > 0, results["masked scores"]
    other = steps.hide(mask.changed(results["scores"]), seen).softmax(dim=-1).nan_to_num(0.0)
    right = mask.seen.expand_as(seen)
    differs = (seen != right).flatten(2).any(dim=-1) & seen.flatten(2).any(dim=-1)  # (B,H)
    if differs.any() and largest(other, actual) <= allowed:
        row, head = differs.nonzero()[0].tolist()
        words = f"{visible_keys(seen[row, head], right[row, head])}, where the mask is {mask.rule}"
        words += f", in batch row {row} and head {head}" * bool(row or head)
        return finding(words, ["mask_of_its_own"], "masked scores")
    is_clear = mask.seen & (actual > 0) & (results["weights"] > 0)
    count = is_clear.sum(dim=-1, keepdim=True).clamp(min=1)
    logs, scores = (each.where(is_clear, 0.0) for each in (actual.log(), masked))
    logs, scores = ((each - each.sum(-1, keepdim=True) / count).where(is_clear, 0.0) for each in (logs, scores))
    factor = float((logs * scores).sum() / scores.square().sum().clamp(min=SMALLEST))
    scaled = torch.softmax(factor * masked, dim=-1).nan_to_num(0.0)
    near = min(2 * allowed, CLOSER * largest(results["weights"], actual))
    if abs(factor - 1) <= 2 * allowed or not largest(scaled, actual) <= near:  # NaN is near nothing
        return None
    words = f"the scores are {factor:.4g} times what they should be, as if the softmax had a temperature"
    return finding(words, ["scores_scaled"], "scores")


def visible_keys(seen: Tensor, right: Tensor) -> str:
    """Describe `seen` (T, S), the visible keys, as a range of keys relative to the query, if one fits all queries.

    If none fits, describe the differences from the `right` mask.
    """
    ahead = torch.arange(seen.shape[1]) - torch.arange(len(seen))[:, None]
    low, high = int(ahead[seen].min()), int(ahead[seen].max())
    if not torch.equal(seen, (low <= ahead) & (ahead <= high)):
        apart = {"hidden keys are seen by": seen & ~right, "visible keys are missed by": right & ~seen}
        return "; ".join(f"{words} {_block(marked)}" for words, marked in apart.items() if marked.any())
    start = f"key i{low:+d}" if low > 1 - len(seen) else "key 0"
    end = f"key i{high:+d}" if high < seen.shape[1] - 1 else "the last key"
    return f"query i sees {start} to {end}".replace("i+0", "i")


def _block(marked: Tensor) -> str:
    """Describe the queries and keys of marked pairs (T, S), such as "queries 0 to 15: some of 16 to 31" (keys)."""
    rows, keys = (marked.any(dim=dim).nonzero().flatten().tolist() for dim in (1, 0))
    is_whole = int(marked.sum()) == len(rows) * len(keys) and len(keys) == keys[-1] - keys[0] + 1
    who, what = (f"{each[0]} to {each[-1]}" if len(each) > 1 else f"{each[0]}" for each in (rows, keys))
    return f"{'queries' if len(rows) > 1 else 'query'} {who}: {'' if is_whole else 'some of '}{what}"


def _distinct(actual: float, right: float) -> tuple[str, str]:
    """Format two numbers with just enough digits, at least three, to show that they differ."""
    pairs = [(f"{actual:.{digits}g}", f"{right:.{digits}g}") for digits in range(3, 18)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def describe(agreement: Agreement) -> str:
    """Describe the worst error of the output, or of a gradient if the output is right.

    The description has the place and size of the error, and the probes (kinds of inputs) that found it.
    """
    is_worst = {tensor.grade for _, tensor in agreement.tensors()} & {CheckVerdict.wrong} or {CheckVerdict.imprecise}
    wrong = [(probe, tensor) for probe, tensor in agreement.tensors() if tensor.grade in is_worst]
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
    by = f"; found by: {', '.join(finders)}"
    limits = f"error {size}, tolerance {worst.allowed:.3g}"
    if worst.error is not None and worst.error <= worst.allowed:  # only its RMS error is beyond a limit
        rows = f"rows {worst.rows[0]} to {worst.rows[1] - 1}"
        limits = f"RMS error of {rows} {worst.rms:.3g}, tolerance {worst.allowed_rms:.3g}"
    return f"{worst.tensor} is {worst.grade.name} on {probe} inputs: {value} ({limits}){also}{by}"
