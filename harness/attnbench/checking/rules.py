"""Rules: properties of any attention, for any inputs. Each is tried at a short length.

A rule is a function of a `Candidate` that returns a description of a violation, "" if the rule holds, or None if it
does not apply to the workload. Most rules list calls with their right answers, which follow from other calls: other
memory layouts, numbers of another size, operands that need no gradient. Violations by PyTorch's own kernels are only
noted (docs/adr/0007).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from attnbench.checking import conduct, memory, oracle
from attnbench.checking.case import TORCH_DTYPES, Case, build, draw_normal
from attnbench.checking.conventions import settle
from attnbench.checking.probes import TOKENS, VacuousError, draw_near
from attnbench.checking.reference import (
    Observation,
    Reference,
    ask,
    errors,
    gradients,
    lacks_backward,
    output_error,
    reference_for_probe,
    require_form,
)
from attnbench.contract import Implementation
from attnbench.storage.records import HIDDEN_NAN, REPEATABLE, Grade, RuleResult
from attnbench.workloads.masks import Padding
from attnbench.workloads.workload import Workload

LENGTH = 35
"""The length for rules, which no tile divides; shorter workloads use their own."""
OUTPUTS_APART = "outputs apart"
KEPT = "a second call gives the answer to the inputs of an earlier call"
FEWER = 2
"""The number of keys that a later call drops."""
SIZES = {"float16": (10, 13, 10)}
USUAL_SIZES = (20, 20, 20)
"""Powers of 2 by which keys, values and incoming gradients are multiplied or divided: float16 has few."""
LARGE_VALUES = "large values"
NEARLY_EQUAL = 2.0**-3
"""Queries scaled by this have scores of similar size."""
EXPANDED = (
    {"query": 0, "key": 1, "value": 0, "x": 0, "context": 0},
    {"query": 2, "key": 0, "value": 1},
    {"query": 1, "key": 2},
)
"""The axis along which each operand is one expanded row."""
LEAST_APART = 2.0**-18
"""Answers that differ by a smaller share differ only in precision, in any dtype."""
AXES = ("batch rows", "heads", "tokens")
Answer = dict[str, Tensor]
Rule = Callable[["Candidate"], str | None]
RulesAt = dict[tuple[object, ...], RuleResult | None]
"""The result of each rule for one implementation, by the rule's name and the kind of workload."""


@lru_cache(maxsize=6)
def right_answer(workload: Workload, kind: str, seed: int, on_step: Callable[[], object]) -> Reference:
    """The right answer to a probe or, for "near", to the normal inputs with a few numbers changed.

    Implementations, and workloads with the same short length, share it.
    """
    if kind == "near":
        return Reference(workload, draw_near(workload, seed), seed, has_gradients=False)
    return reference_for_probe(workload, kind, seed, on_step)


class Candidate:
    """An implementation at one workload, with its references for two kinds of input."""

    def __init__(
        self,
        implementation: Implementation,
        workload: Workload,
        seed: int,
        on_step: Callable[[], object],
        *,
        needs_zeros: bool = False,
    ) -> None:
        """Call the implementation on the normal inputs; its exceptions and those of a reference propagate.

        With `needs_zeros`, queries that see no key must get 0; otherwise their answers are not compared.
        """
        self.implementation, self.workload, self.needs_zeros = implementation, workload, needs_zeros
        shared = right_answer if workload.longest <= LENGTH else lru_cache(right_answer.__wrapped__)  # large: not kept
        self.right = partial(shared, workload, seed=seed, on_step=on_step)
        self.normal = self.right("normal")
        self.output = self.call()  # on the normal inputs
        self.tolerance = 2 * self.normal.tolerance("output")  # the largest difference of two honest answers
        self.tokens = {name: tensor for name, tensor in self.normal.inputs.tensors.items() if name in TOKENS}
        self.sources = [name for name in ("key", "value", "context") if name in self.tokens]  # rows of keys
        if self.workload.layout == "value_in_key":
            self.sources.remove("value")
        seen = oracle.row_mask(self.workload, torch.arange(self.workload.seq_len)).seen[:, 0]  # (B, T, S)
        self.sees_nothing = ~seen.any(dim=-1)  # (B, T)
        self.empty = self.sees_nothing & (not needs_zeros and workload.sinks == "none")  # they may get any answer
        self.seen = seen | self.empty[..., None]
        hidden = (~self.seen).any(dim=0).any(dim=0).nonzero().flatten()
        self.hidden_key = int(hidden[-1]) if len(hidden) else None  # the last key that some query does not see

    @cached_property
    def grad_output(self) -> Tensor | None:
        """The incoming gradient: 0 for queries that may get any answer, so that it reaches no other gradient."""
        usual = self.normal.grad_output
        return None if usual is None else usual.masked_fill(self.of_empty("output", usual), 0.0)

    def of_empty(self, name: str, tensor: Tensor) -> Tensor:
        """The numbers of a tensor that depend on the answer of queries that see no key; it broadcasts to the tensor."""
        operand = name.removeprefix("gradient of ")
        if operand in {"output", "query"} or (operand == "x" and "context" in self.tokens):
            rows = self.empty  # (B, T)
        else:
            rows = self.empty.any(dim=1, keepdim=True)  # every key and value of the batch row
        if operand not in {"output", *TOKENS}:
            return rows.any().to(tensor.device)
        shape = (rows.shape[0], *[1] * (tensor.dim() - 3), rows.shape[1], 1)
        return rows.view(shape).to(tensor.device)

    def case(self, reference: Reference | None = None) -> Case:
        """A case on fresh copies of a reference's inputs, by default the normal ones."""
        inputs = (reference or self.normal).inputs
        return build(self.workload, self.implementation, inputs.map(lambda tensor: tensor.clone()))

    def changed(
        self, tensors: Mapping[str, Tensor] | None = None, frozen: Collection[str] = (), **of_mask: float | str
    ) -> tuple[Case, Tensor]:
        """A call on the normal inputs, some of them replaced, with other attributes of the mask; and its output.

        The leaves in `frozen` need no gradient.
        """
        case, tensors = self.case(), dict(tensors or {})
        if self.workload.layout == "value_in_key" and "key" in tensors:
            tensors["value"] = tensors["key"][..., : self.workload.value_dim]
        # Without gradients the call would run in another mode than the one it is compared with.
        needs_grad = self.workload.direction != "inference"
        alike = {id(tensor): tensor.detach().requires_grad_(needs_grad) for tensor in tensors.values()}
        case.tensors.update({name: alike[id(tensor)] for name, tensor in tensors.items()})
        for name in frozen:
            case.leaves[name].requires_grad_(False)  # noqa: FBT003
        vars(case.mask).update(of_mask)
        case.mask.change = memory.MASK_FORMS.get(case.mask.form, case.mask.change)
        with conduct.watched(case.tensors, case.mask), case.grad_mode():
            output = case.output()
        require_form(self.workload, output)
        return case, output

    def call(self, tensors: Mapping[str, Tensor] | None = None, **of_mask: float | str) -> Tensor:
        """The output of a changed call."""
        return self.changed(tensors, (), **of_mask)[1].detach()

    def ask(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        grad: Tensor | None = None,
        frozen: Collection[str] = (),
        form: str = "",
    ) -> Answer:
        """The output and the gradients of a changed call, for that gradient of the output and form of the mask."""
        case, output = self.changed(tensors, frozen, form=form)
        return {"output": output.detach()} | self.pulled_back(case, output, grad)

    def pulled_back(self, case: Case, output: Tensor, grad: Tensor | None = None) -> Answer:
        """The gradients; empty in inference, or without a backward pass."""
        if self.grad_output is None:
            return {}
        try:
            grad = self.grad_output.clone() if grad is None else grad
            return gradients(case, output, self.normal, grad, retain_graph=True)
        except Exception as error:
            if lacks_backward(error):
                return {}
            raise

    @cached_property
    def answer(self) -> Answer:
        """The output and the gradients on the normal inputs."""
        return self.ask()

    def moved_by(self, name: str, change: Callable[[Tensor], Tensor]) -> float:
        """The largest change of the output after changing the hidden key's row in the tensor `name`.

        Only queries that do not see that key count; infinite if only one of the outputs is finite.
        """
        tensor, key = self.normal.inputs.tensors[name].clone(), self.hidden_key
        if key is None:
            return 0.0
        tensor[..., key, :] = change(tensor[..., key, :])
        outputs = self.call({name: tensor}), self.output
        rows = (each.transpose(1, 2) if each.dim() == 4 else each for each in outputs)  # noqa: PLR2004 - (B,T,H,V)
        is_hidden = ~self.seen[:, :, key].to(self.output.device)  # (B, T)
        return _apart(*(each[is_hidden] for each in rows))

    def apart(self, actual: Answer | Tensor, expected: Answer | Tensor) -> str:
        """The first tensor of two answers that differs more than honest ones may, and by how much; or "".

        A tensor is an output alone. Outputs of queries that see no key are left out, and gradients that they make NaN.
        """
        known = self.normal.expected
        actual, expected = ({"output": each} if isinstance(each, Tensor) else each for each in (actual, expected))
        for name, right in expected.items():
            if name not in known:
                continue
            usual, size = (float(each.nan_to_num(0.0, 0.0, 0.0).abs().max()) for each in (known[name], right))
            larger = max(1.0, size / usual) if usual else 1.0
            allowed = max(2 * self.normal.tolerance(name) * larger, LEAST_APART * size)
            observed = actual.get(name, torch.zeros_like(right))
            is_free = self.of_empty(name, right) & (observed.isnan() | right.isnan() | (name == "output"))
            if not (found := _apart(*(each.masked_fill(is_free, 0.0) for each in (observed, right)))) <= allowed:
                return f"{name}: off by {found:.3g} (tolerance {allowed:.3g})"
        return ""


Trial = tuple[str, Callable[[], Answer | Tensor], Answer | Tensor]
"""A description of a change, a function that computes its answer, and the required answer."""


def compared(trials: Callable[[Candidate], Iterable[Trial]]) -> Rule:
    """A rule that all answers are the required ones; it does not apply without any trial.

    A wrong answer counts before the first error that a trial raises.
    """

    def rule(candidate: Candidate) -> str | None:
        refusal: Exception | None = None
        result = None
        for words, give, expected in trials(candidate):
            result = ""
            try:
                actual = give()
            except Exception as error:  # noqa: BLE001 - a candidate may raise anything
                refusal = refusal or error
                continue
            if apart := candidate.apart(actual, expected):
                return f"{words} another {apart}"
        if refusal is not None:
            raise refusal
        return result

    return rule


def output_off(candidate: Candidate, output: Tensor, reference: Reference) -> str:
    """The error of an output, in words; "" if it is right."""
    rows = output.detach().index_select(-2, reference.rows.to(output.device))
    observed = Observation(output.detach(), {"output": rows})
    settled, _ = settle(observed, reference, "" if candidate.needs_zeros else None)
    found, _ = output_error(settled.output, reference)
    if found.grade is not Grade.wrong:
        return ""
    size = "not finite" if found.error is None else f"off by {found.error:.3g} (tolerance {found.allowed:.3g})"
    return f"at seq_len={reference.workload.seq_len} and kv_len={reference.workload.kv_len} its output is wrong: {size}"


def right_when_short(candidate: Candidate) -> str:
    """The answer is right at the short length; this comes first, before other rules are tried there."""
    return output_off(candidate, candidate.output, candidate.normal)


def fewer_keys(candidate: Candidate) -> str | None:
    """A call with fewer keys (and, if T = S, fewer queries) is right after one with more."""
    workload, seed = candidate.workload, candidate.normal.seed
    length = workload.kv_len - FEWER
    if length < 1:
        return None
    sizes = {"kv_len": length} | ({"seq_len": length} if workload.seq_len == workload.kv_len else {})
    try:
        fewer = msgspec.structs.replace(workload, **sizes, mask=str(workload.mask_rule.at_other_length()))
        reference = Reference(fewer, draw_normal(fewer, seed), seed, has_gradients=False)
    except ValueError:  # no such mask, or nothing to compare
        return None
    candidate.call()
    case = build(fewer, candidate.implementation, reference.inputs.map(lambda tensor: tensor.clone()))
    with case.grad_mode():
        found = output_off(candidate, case.output(), reference)
    return found and f"after a call with more keys, {found}"


def without_gradients(candidate: Candidate) -> str:
    """Calls without gradients are right, and so is the next one on nearly equal inputs.

    Isolated code is also called in torch.inference_mode.
    """
    if right_when_short(candidate):
        return ""
    for is_inference in (False, True):
        outputs: list[Tensor] = []
        for reference in (candidate.normal, candidate.right("near")):
            case = candidate.case(reference)
            vars(case.mask).update(is_inference=is_inference)
            with torch.no_grad():
                outputs.append(case.output())
            vars(case.mask).update(is_inference=False)
            if found := output_off(candidate, outputs[-1], reference):
                is_kept = len(outputs) > 1 and torch.equal(*outputs)
                mode = "inference_mode" if is_inference else "no_grad"
                return KEPT if is_kept else f"without gradients (torch.{mode}), {found}"
    return ""


@compared
def gradients_apart(candidate: Candidate) -> Iterator[Trial]:
    """Gradients depend neither on the strides of the incoming one, nor on the others requested, nor on earlier passes.

    In scope `module`, either only weights or only tokens are requested.
    """
    if (usual := candidate.grad_output) is None:
        return
    narrow = {
        "one number expanded, as that of a sum,": torch.ones_like(usual[:1, :1, :1]).flatten()[0],
        "one row expanded over the queries": usual[..., :1, :],
    }
    for words, numbers in narrow.items():
        grad = numbers.expand_as(usual)
        dense = candidate.ask(grad=grad.contiguous())  # it reaches gradients through queries that see no key
        dense = {name: each.masked_fill(candidate.of_empty(name, each), math.nan) for name, each in dense.items()}
        yield f"an incoming gradient that is {words} gives", partial(candidate.ask, grad=grad), dense
    spread = memory.LAYOUTS["spread out in memory"](usual, candidate.case().device.alignment_bytes)
    words = "an incoming gradient that is spread out in memory gives"
    yield words, partial(candidate.ask, grad=spread), candidate.answer
    every = list(candidate.case().leaves)
    weights = [name for name in every if name.startswith("parameter ")]
    for group in [weights, [*candidate.tokens]] if weights else [[name] for name in candidate.tokens]:
        what = "weights" if group is weights else " and the ".join(group)
        names = {"output", *(f"gradient of {name}" for name in group)}
        names |= {name for name in candidate.answer if group is weights and name.endswith(" weights")}
        needed = {name: each for name, each in candidate.answer.items() if name in names}
        others = [name for name in every if name not in group]
        yield f"where the {what} alone need a gradient, it gives", partial(candidate.ask, frozen=others), needed
    case, output = candidate.changed()
    first = {name: each.clone() for name, each in candidate.pulled_back(case, output).items()}
    yield "a second backward pass of one graph gives", partial(candidate.pulled_back, case, output), first


@compared
def sizes(candidate: Candidate) -> Iterator[Trial]:
    """Small incoming gradients give small gradients; a smaller query with a larger key changes no score.

    Factors are powers of 2, which change no digit: any difference means overflow or lost small numbers.
    """
    of_key, _, of_grad = (2.0**power for power in SIZES.get(candidate.workload.dtype, USUAL_SIZES))
    if (usual := candidate.grad_output) is not None:

        def for_small() -> Answer:
            answer = candidate.ask(grad=usual / of_grad)
            return {name: each if name == "output" else of_grad * each for name, each in answer.items()}

        yield f"an incoming gradient {of_grad:g} times smaller gives", for_small, candidate.answer
    if candidate.workload.scope == "attention":
        moved = {"query": candidate.tokens["query"] / of_key, "key": candidate.tokens["key"] * of_key}
        words = f"a query {of_key:g} times smaller, with a key as much larger, gives"
        of_value = of_key if candidate.workload.layout == "value_in_key" else 1.0  # such values grow with their keys
        yield words, lambda: candidate.call(moved) / of_value, candidate.output


@compared
def large_values(candidate: Candidate) -> Iterator[Trial]:
    """Scaling the values in one column by a large factor scales the output there by the same factor.

    Values have one sign and scores are similar, so that sums of exponentials times values are large. In float16 it is a
    convention: much code overflows in these sums. If values are part of the keys, both are scaled, and the query is 0,
    so that scores do not depend on the keys.
    """
    if candidate.workload.scope == "attention":
        name, share = ("key", 0.0) if candidate.workload.layout == "value_in_key" else ("value", NEARLY_EQUAL)
        value = candidate.tokens[name].clone()
        value[..., 0] = value[..., 0].abs()
        factor = torch.ones_like(value[0, 0, 0])
        factor[0] = 2.0 ** SIZES.get(candidate.workload.dtype, USUAL_SIZES)[1]
        alike = {"query": candidate.tokens["query"] * share, name: value}
        usual, large = candidate.call(alike), alike | {name: value * factor}
        factors = factor[: candidate.workload.value_dim]
        yield f"values {factor[0]:g} times larger give", lambda: candidate.call(large) / factors, usual


@compared
def no_scale(candidate: Candidate) -> Iterator[Trial]:
    """A scale of 0 gives every visible key the same weight, like a query of 0.

    It applies if the workload gives a scale. A result that is not finite is ignored: -inf scores were multiplied by 0.
    """
    if candidate.workload.scale and candidate.workload.scope == "attention":
        actual = candidate.call(scale=0.0)
        right = candidate.call({"query": torch.zeros_like(candidate.tokens["query"])})
        yield "a scale of 0 gives", lambda: actual if actual.isfinite().all() else right, right


@compared
def masks_in_memory(candidate: Candidate) -> Iterator[Trial]:
    """A function reads a mask or bias correctly in any memory layout.

    A learned bias with one row for all queries has the summed gradient of its copies.
    """
    workload, rule = candidate.workload, candidate.workload.mask_rule
    if workload.scope == "module" or not (rule.hides or rule.changes_scores):
        return
    for form in memory.MASK_FORMS:
        if form not in memory.OTHER_MASKS:
            yield f"a mask that is {form} gives", partial(candidate.call, form=form), candidate.output
    if candidate.grad_output is not None and rule.is_learned:
        one = partial(candidate.ask, form=memory.ONE_ROW)
        yield f"a bias that is {memory.ONE_ROW} gives", one, candidate.ask(form=memory.COPIED_ROW)


@compared
def masks_of_heads(candidate: Candidate) -> Iterator[Trial]:
    """A function takes masks that differ between heads, or refuses them.

    Not tried for the causal mask and padding, which are the same in all heads: code may look for unused keys in one.
    """
    workload, rule = candidate.workload, candidate.workload.mask_rule
    if workload.scope == "module" or not (rule.hides or rule.changes_scores) or candidate.sees_nothing.any():
        return
    if workload.mask != "causal" and not any(isinstance(part, Padding) for part in rule.parts):
        expected = candidate.output.clone()
        expected[:, 1::2] = candidate.call(form=memory.OF_OTHERS)[:, 1::2]
        words = f"a mask that is {memory.OF_HEADS} gives"
        yield words, partial(candidate.call, form=memory.OF_HEADS), expected


@compared
def layouts(candidate: Candidate) -> Iterator[Trial]:
    """Operands in other memory layouts give the same answer: transposed, at an offset, with gaps, expanded, shared.

    After each layout alone, neighbouring tensors have different ones. They keep the alignment that the device needs.
    Expanded rows, with stride 0, are compared with copies of them; one tensor as several operands gets the sum of their
    gradients.
    """
    workload, tokens, names = candidate.workload, candidate.tokens, list(memory.LAYOUTS)
    alignment_bytes = candidate.case().device.alignment_bytes
    alone = [dict.fromkeys(tokens, name) for name in names]
    mixed = [
        {token: names[(place + turn) % len(names)] for place, token in enumerate(tokens)} for turn in range(len(names))
    ]
    for way in (*alone, *mixed):
        kinds = {*way.values()}
        words = ", ".join(kinds if len(kinds) == 1 else (f"{name} ({token})" for token, name in way.items()))
        tensors = {token: memory.LAYOUTS[name](tokens[token], alignment_bytes) for token, name in way.items()}
        yield f"inputs that are {words} give", partial(candidate.ask, tensors), candidate.answer
    for axes in EXPANDED:
        along = {name: axis for name, axis in axes.items() if name in tokens}
        if along:
            rows = {name: tokens[name].narrow(axis, 0, 1).expand_as(tokens[name]) for name, axis in along.items()}
            copied = candidate.ask({name: tensor.contiguous() for name, tensor in rows.items()})
            words = ", ".join(f"{name} over {AXES[axis]}" for name, axis in along.items())
            yield f"inputs that are expanded ({words}) give", partial(candidate.ask, rows), copied
    if workload.scope == "module" or workload.layout == "value_in_key" or workload.head_dim != workload.value_dim:
        return
    alike = [name for name, tensor in tokens.items() if tensor.shape == tokens["key"].shape]
    for axis in (2, 3):
        views = memory.packed([tokens[name] for name in alike], axis)
        words = f"inputs that are views of one buffer ({', '.join(alike)}, packed at axis {axis}) give"
        yield words, partial(candidate.ask, dict(zip(alike, views, strict=True))), candidate.answer
    one = tokens["key"].clone()
    copies = candidate.ask({name: one.clone() for name in alike})
    grads = [name for name in (f"gradient of {each}" for each in alike) if name in copies]
    total = sum((copies[name].double() for name in grads), torch.zeros(()))
    same = partial(candidate.ask, dict.fromkeys(alike, one))
    yield f"one tensor as {' and '.join(alike)} gives", same, copies | dict.fromkeys(grads, total)


def outputs_apart(candidate: Candidate) -> str:
    """A later call does not change an earlier call's output, and uses the current contents of its tensors."""
    case, other = candidate.case(), candidate.right("needles")
    with case.grad_mode():
        first = case.output()
        kept = first.detach().clone()
        for name, tensor in case.tensors.items():
            tensor.data.copy_(other.inputs.tensors[name])
        second = case.output()
    blocks = {tensor.untyped_storage().data_ptr() for tensor in case.tensors.values()}
    is_view = first.untyped_storage().data_ptr() in blocks  # an input's memory, which has new values by now
    if not is_view and not torch.equal(kept.nan_to_num(), first.nan_to_num()):
        return "a later call overwrote the output of an earlier one: they share memory"

    if not output_off(candidate, second, other):
        return ""
    if not output_off(candidate, second, candidate.normal):
        return KEPT
    if output_off(candidate, ask(candidate.implementation, other).output, other):
        return ""
    return "a second call on other values in the same tensors is wrong: something is kept from the first"


def backwards_apart(candidate: Candidate) -> str:
    """After two forward calls, the backward pass of each gives the gradients of its own call."""

    def is_wrong(observed: dict[str, Tensor], reference: Reference) -> list[str]:
        return [each.tensor for each in errors(observed, reference) if each.grade is Grade.wrong]

    if candidate.grad_output is None:
        return ""
    both = (candidate.normal, candidate.right("needles"))
    first = candidate.case()
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in both[1].inputs.tensors.items()}
    cases = (first, dataclasses.replace(first, tensors=tensors))
    with first.grad_mode():
        outputs = [case.output() for case in cases]
    for which, case, output, reference in zip(("first", "second"), cases, outputs, both, strict=True):
        wrong = is_wrong(gradients(case, output, reference), reference)
        if wrong and not is_wrong(ask(candidate.implementation, reference).compared, reference):
            words = f"after two forward calls the backward pass of the {which} gives another {', '.join(wrong)}"
            return f"{words}: it reads what belongs to the other call"
    return ""


def hidden(candidate: Candidate, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> str:
    """Changes of a hidden key and its value, each a row (B, G, width) or (B, width), reach no query."""
    leaks = [
        words.format(name)
        for name in candidate.sources
        for words, change in changes.items()
        if not candidate.moved_by(name, change) <= candidate.tolerance
    ]
    return f"queries are reached by a hidden {', '.join(leaks)}" if leaks else ""


def hidden_keys(candidate: Candidate) -> str:
    """The contents of a hidden key and its value, if they and the scores are finite, change nothing.

    The factor shifts the mean of all keys, or values, by about one of them: code that subtracts that mean before it
    computes in finite precision loses little. Leaks that need larger scores show on the large inputs.
    """
    factor = 1.0 + candidate.workload.kv_len
    return hidden(candidate, {f"{{}} {factor:g} times as large": lambda row: factor * row})


def hidden_nan(candidate: Candidate) -> str:
    """NaN, Inf or a number near the end of the dtype's range in a hidden key or value stays there."""
    huge = math.sqrt(torch.finfo(TORCH_DTYPES[candidate.workload.dtype]).max)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "NaN in the {}": partial(torch.full_like, fill_value=math.nan),
        "Inf in the {}": partial(torch.full_like, fill_value=math.inf),
        f"a {{}} {huge:.2g} times as large": lambda row: huge * row,
    }
    return hidden(candidate, changes)


def repeatable(candidate: Candidate) -> str:
    """Repeated calls give the same answer, bit for bit."""
    apart = _apart(candidate.call(), candidate.output)
    return "" if apart == 0 else f"two calls differ by {apart:.3g}"


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite if only one is finite; 0 where both are not finite."""
    one, other = one.double().cpu(), other.double().cpu()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    return float((one - other).abs().where(one.isfinite(), 0.0).max()) if one.numel() else 0.0


class Tried(NamedTuple):
    """A rule, and the axes of workloads on which it may depend: it is tried for each of their values.

    A violation is only noted if the rule `is_noted`. With `may_refuse` an error, such as one about a layout, is noted.
    """

    rule: Rule
    axes: tuple[str, ...]
    may_refuse: bool = False
    is_noted: bool = False


EVERY = ("scope", "direction", "dtype", "mask", "bias", "layout", "sinks", "scale")
USUAL = ("scope", "direction", "half", "way")
OF_OPERANDS = ("scope", "direction", "half", "operands")
HIDING = ("scope", "direction", "hides")
RULES: dict[str, Tried] = {
    "right when short": Tried(right_when_short, (*USUAL, "square")),
    "without gradients": Tried(without_gradients, USUAL),
    OUTPUTS_APART: Tried(outputs_apart, USUAL),
    "backward passes apart": Tried(backwards_apart, USUAL),
    "gradients apart": Tried(gradients_apart, USUAL, may_refuse=True),
    "sizes": Tried(sizes, ("scope", "numbers")),
    LARGE_VALUES: Tried(large_values, ("scope", "direction", "dtype")),
    "scale of 0": Tried(no_scale, ("scope", "direction"), may_refuse=True),
    "fewer keys": Tried(fewer_keys, ("scope", "sizes"), may_refuse=True),
    "masks in memory": Tried(masks_in_memory, ("scope", "direction", "mask"), may_refuse=True),
    "masks of heads": Tried(masks_of_heads, HIDING, may_refuse=True),
    "layouts": Tried(layouts, OF_OPERANDS, may_refuse=True),
    "hidden keys": Tried(hidden_keys, ("scope", "direction", "half", "mask")),
    HIDDEN_NAN: Tried(hidden_nan, HIDING, is_noted=True),
    REPEATABLE: Tried(repeatable, HIDING, is_noted=True),
}


def kind(workload: Workload, axes: Iterable[str]) -> tuple[object, ...]:
    """A workload's values on these axes."""
    rule = workload.mask_rule
    way = workload.mask if workload.mask in {"none", "causal"} else (rule.hides, rule.changes_scores)
    known = {
        "half": workload.dtype in {"bfloat16", "float16"},
        "square": workload.seq_len == workload.kv_len,
        "sizes": (workload.direction, rule.hides, workload.seq_len == workload.kv_len),
        "hides": rule.hides,
        "way": way,
        "numbers": (workload.direction, workload.dtype),
        # Grouped key heads are repeated before they reach functions.
        "operands": (way, workload.num_heads == workload.num_kv_heads, workload.num_heads > 1),
    }
    return tuple(known[axis] if axis in known else getattr(workload, axis) for axis in axes)


def for_rules(workload: Workload) -> Workload:
    """The workload of a rule: forward, without dropout, contiguous, and of two batch rows if its mask allows them."""
    direction = "inference" if workload.direction == "inference" else "forward"
    layout = workload.layout if workload.layout == "value_in_key" else "contiguous"
    plain = msgspec.structs.replace(workload, direction=direction, layout=layout, dropout=0.0)
    with contextlib.suppress(ValueError):
        return msgspec.structs.replace(plain, batch_size=max(2, workload.batch_size))
    return plain


def untried(workload: Workload, known: RulesAt) -> dict[str, Tried]:
    """The rules to try: a rule is left out if it held at workloads that together have all values of this one.

    A broken rule is tried at every kind, but only once at each.
    """
    found: dict[str, Tried] = {}
    for name, each in RULES.items():
        mine = kind(workload, each.axes)
        others = {key[1:]: result for key, result in known.items() if key[0] == name}
        if mine in others or kind(workload, EVERY) in others:
            continue
        same = [key for key, result in others.items() if result is not None and key[0] == mine[0]]
        is_broken = any(result is not None and not (result.holds or result.is_noted) for result in others.values())
        if is_broken or not all(any(key[axis] == value for key in same) for axis, value in enumerate(mine)):
            found[name] = each
    return found


def results_at(workload: Workload, known: RulesAt) -> tuple[RuleResult, ...]:
    """The results of the rules at this kind of workload."""
    found = (known.get((name, *kind(workload, each.axes))) for name, each in RULES.items())
    return tuple(each for each in found if each is not None)


def try_rules(
    candidate: Candidate,
    known: RulesAt,
    rules: Mapping[str, Tried] | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> None:
    """Try some rules, and add their results to `known`; an exception of the candidate breaks a rule.

    `on_step` is called before each.
    """
    for name, (rule, axes, may_refuse, is_noted) in (RULES if rules is None else rules).items():
        on_step()
        is_noted |= (name, candidate.workload.dtype) == (LARGE_VALUES, "float16")  # noqa: PLW2901
        try:
            broken = rule(candidate)
        except VacuousError:
            broken = None
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            kind_of = type(error).__name__
            broken = "" if lacks_backward(error) else f"{kind_of}: {(str(error).splitlines() or [''])[0]}"
            is_noted = RULES[name].is_noted or may_refuse or kind_of == NotImplementedError.__name__  # noqa: PLW2901
        if broken is None:
            known[name, *kind(candidate.workload, EVERY)] = None
        else:
            key = (name, *kind(candidate.workload, axes))
            known[key] = RuleResult(rule=name, holds=not broken, found=broken, is_noted=is_noted)
