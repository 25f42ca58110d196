"""Rules: properties that any attention has for any inputs. `attnbench explain` lists them.

A rule is a generator that takes a `Candidate`, an implementation under test at a short length. For each trial it yields
"" if the rule holds, a description of the violation, the exception that the candidate raised, or a `RuleResult`. A rule
that yields nothing does not apply. Most trials compare two calls that have the same right answer, but differ in memory
layout, the size of numbers, or the operands that need gradients. If PyTorch's own kernels violate a rule, a violation
is only noted, and does not make an implementation wrong (docs/adr/0007). Shapes as in the contract.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from attnbench.case import TORCH_DTYPES, draw_normal, place, pull_back_twice
from attnbench.checking import memory, oracle, side_effects
from attnbench.checking.calls import INFERENCE, NO_GRAD, WEIGHTS, Call, Caller, call_on, caller_of
from attnbench.checking.mistakes import turned
from attnbench.checking.probes import NEAR, TOKENS, VacuousError, draw_large
from attnbench.checking.reference import (
    Reference,
    References,
    apply_empty_row_convention,
    call_candidate,
    distance,
    errors,
    is_half,
    output_error,
    reference_for_probe,
)
from attnbench.checking.steps import Mistake, hide, wrong
from attnbench.contract import Implementation
from attnbench.contract.bound_mask import SPLIT
from attnbench.contract.declared import words
from attnbench.storage.records import (
    BIAS,
    CAUSAL,
    EMPTY_ROWS,
    HIDDEN_NAN,
    LOST_NAN,
    MINUS_INFINITY,
    ONE_MASK,
    PRODUCTS,
    RANGE,
    REPEATABLE,
    SIGN,
    CheckVerdict,
    RuleResult,
)
from attnbench.workloads.masks import Causal, Padding, aligned_at_end
from attnbench.workloads.workload import Workload

LENGTH = 35  # the short length, not a multiple of any tile length; shorter workloads keep their lengths
OUTPUTS_APART = "outputs apart"  # a rule's name
KEPT = "a second call gives the answer to the inputs of an earlier call"
FEWER, MORE = 2, 6
"""In the rule "fewer keys", the first call has FEWER keys more than the second, or MORE times as many."""
SIZES = {"float16": (10, 13, 10)}
USUAL_SIZES = (20, 20, 20)
"""Exponents of powers of 2, by dtype; USUAL_SIZES is for all other dtypes. Keys and values are multiplied by the first
two powers, incoming gradients divided by the third. Powers of 2 change no digit of a number."""
LARGE_VALUES, NO_RULE = "large values", "no rule"
NEARLY_EQUAL, LARGER = 2.0**-3, 2.0**6
"""Factors of queries. With NEARLY_EQUAL, a query's scores are nearly equal; with LARGER, they differ so much that
exponentials of their differences overflow."""
BEYOND_RANGE = 4.0
"""Factor of large queries that takes their products with keys beyond the range of float16."""
NOT_FINITE = "off by inf"
EXPANDED = (
    {"query": 0, "key": 1, "value": 0, "x": 0, "context": 0},
    {"query": 2, "key": 0, "value": 1},
    {"query": 1, "key": 2},
)
"""Cases in which operands are expanded: for each operand, the axis along which one row is repeated with stride 0."""
CHUNKS, CHUNK_WORDS = (20, 5), "20, 5, then 1"  # tokens in the first chunks; the others have one token
TWICE = 20.0  # limit of a second derivative's error, as a multiple of the textbook form's error
LEAST_APART = 2.0**-18
"""In any dtype, a relative difference of at most this between two answers counts as rounding."""
AXES = ("batch rows", "heads", "tokens")  # names of the first three axes of query, key and value
USUAL = ("scope", "direction", "half", "way")
HIDING = ("scope", "direction", "hides")
"""Properties of a workload, by name, on which the results of many rules depend. Some, such as "half", are not fields of
a workload; `_values` computes them."""
ANOTHER_BATCH, POOLS, NEIGHBOURS = "another batch", "pools in memory", "neighbours"
OTHER_SETTINGS = "other settings"
RULES_OF_BATCHES = {
    "right when short",
    "without gradients",
    OUTPUTS_APART,
    REPEATABLE,
    ANOTHER_BATCH,
    OTHER_SETTINGS,
    POOLS,
    NEIGHBOURS,
}
"""Rules that are also tried on batches of requests. The other rules use layouts, or keys, that no cache can have."""
Tensors = dict[str, Tensor]  # the output and the gradients, by name
Outcome = str | Exception | RuleResult
RulesAt = dict[tuple[object, ...], RuleResult | None]
"""Results of rules for one implementation: (rule's name, values of its axes) -> result, which applies to any workload
with these values. If a rule does not apply, the item is (rule's name, workload) -> None."""


class Rule(NamedTuple):
    """A rule, and its axes (properties of a workload): it is tried once for each combination of the axes' values.

    If `is_noted`, a violation is only noted. If `may_refuse`, an error that the candidate raises, such as one about a
    layout, is only noted, too.
    """

    trials: Callable[["Candidate"], Iterator[Outcome]]
    axes: tuple[str, ...]
    may_refuse: bool = False
    is_noted: bool = False


RULES: dict[str, Rule] = {}


def rule(name: str, *axes: str, may_refuse: bool = False, is_noted: bool = False) -> Callable[..., None]:
    """Return a decorator that adds a function to the end of RULES, as the rule `name`; arguments are as in `Rule`."""
    return lambda trials: RULES.update({name: Rule(trials, axes, may_refuse, is_noted)})


right_answer = lru_cache(maxsize=6)(reference_for_probe)


class Candidate:
    """An implementation under test at one workload, with its references for several kinds of input."""

    def __init__(self, caller: Caller, workload: Workload, asked: References, *, needs_zeros: bool) -> None:
        """Call the implementation on the normal inputs; exceptions of this call and of `Reference` propagate.

        If `needs_zeros`, queries that see no key must get 0; otherwise their answers are not compared.
        """
        self.caller, self.workload, self.alignment_bytes = caller, workload, asked.alignment_bytes
        self.convention = "" if needs_zeros else None
        shared = right_answer if workload.longest <= LENGTH else lru_cache(right_answer.__wrapped__)  # not kept if long
        self.right = partial(shared, workload, seed=asked.seed, on_step=asked.on_step)
        self.normal = self.right("normal")
        self.tokens = {name: tensor for name, tensor in self.normal.inputs.tensors.items() if name in TOKENS}
        self.sources = [name for name in ("key", "value", "context") if name in self.tokens]  # with a row for each key
        if workload.layout == "value_in_key":
            self.sources.remove("value")
        self.seen = oracle.row_mask(workload, torch.arange(workload.seq_len)).seen[:, 0]  # (B, T, S)
        self.empty = ~self.seen.any(dim=-1) & (not needs_zeros)  # (B, T): queries that may get any answer
        # With such queries gradients are not compared: they may hold any number, or NaN.
        self.grad_output = None if self.empty.any() else self.normal.grad_output
        self.usual_output = self.call()  # on the normal inputs

    def new_call(
        self,
        reference: Reference | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        **of_mask: Any,  # noqa: ANN401 - any attribute
    ) -> Call:
        """Build a call on new copies of the inputs of a reference (default: `self.normal`), some replaced by `tensors`.

        `of_mask` sets attributes of the BoundMask.
        """
        right, tensors = reference or self.normal, dict(tensors or {})
        if self.workload.layout == "value_in_key" and "key" in tensors:
            tensors["value"] = tensors["key"][..., : self.workload.value_dim]
        inputs = right.inputs.map(lambda tensor: tensor.clone())
        call = call_on(dataclasses.replace(inputs, tensors=inputs.tensors | tensors), right.workload)
        return call.under(**of_mask) if of_mask else call

    def output(self, call: Call, **changes: Any) -> Tensor:  # noqa: ANN401 - fields of a Call
        """Make a call, with some of its fields changed; return the output."""
        return self.caller.call(dataclasses.replace(call, **changes)).output

    def ask(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        grad: Tensor | None = None,
        frozen: Collection[str] = (),
        num_passes: int = 1,
        **of_mask: Any,  # noqa: ANN401 - any attribute
    ) -> Tensors:
        """Call the implementation on the normal inputs, some replaced by `tensors`; return output and gradients.

        `of_mask` sets attributes of the BoundMask. `grad` replaces the output's gradient. Tensors in `frozen` need no
        gradient. The gradients come from the last of `num_passes` backward passes; if `self.grad_output` is None, there
        are none.
        """
        usual = None if self.grad_output is None or not num_passes else self.grad_output.clone()
        given = usual if grad is None or usual is None else grad
        call = self.new_call(tensors=tensors, **of_mask)
        answer = self.caller.call(dataclasses.replace(call, grad_output=given, num_passes=num_passes, frozen=frozen))
        return {"output": answer.output} | self.normal.at_rows(answer.gradients)

    def call(self, tensors: Mapping[str, Tensor] | None = None, **of_mask: Any) -> Tensor:  # noqa: ANN401 - see `ask`
        """Call the implementation as `ask` does, without backward passes; return the output."""
        return self.ask(tensors, num_passes=0, **of_mask)["output"]

    @cached_property
    def answer(self) -> Tensors:
        """The output and the gradients on the normal inputs."""
        return self.ask()

    def compare(
        self,
        words: str,
        expected: Tensors | Tensor,
        give: Callable[[], Tensors | Tensor] | None = None,
        least: float = LEAST_APART,
        **changes: Any,  # noqa: ANN401 - those of `ask`, or of `call`
    ) -> Outcome:
        """Compare the answer of a changed call with `expected`; return "", the difference in words, or the exception.

        `words` describe the call. `give` makes it, by default `ask` with `changes`. If `expected` is a tensor, only
        outputs are compared, and the default is `call`. Answers may differ by twice the tolerance (more if expected
        numbers are larger than usual), or by `least` times the largest expected number. Queries that may get any answer
        are not compared.
        """
        asked = partial(self.call, **changes) if isinstance(expected, Tensor) else partial(self.ask, **changes)
        try:
            actual = (give or asked)()
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            return error
        known = self.normal.expected
        actual, expected = ({"output": each} if isinstance(each, Tensor) else each for each in (actual, expected))
        for name, right in expected.items():
            if name not in known:
                continue
            known_size, size = (float(each.nan_to_num(0.0, 0.0, 0.0).abs().max()) for each in (known[name], right))
            larger = max(1.0, size / known_size) if known_size else 1.0
            observed = actual.get(name, torch.zeros_like(right))
            if name == "output":
                observed = torch.where(_along_queries(self.empty, right), right, observed)
            found = distance(observed, right)
            for limit in self.normal.limits(name):
                allowed = max(2 * limit * larger, least * size)
                if found <= allowed:
                    break
            else:
                return f"{words} another {name}: off by {found:.3g} (tolerance {allowed:.3g})"
        return ""

    def off(self, output: Tensor, reference: Reference) -> str:
        """Describe the error of an output compared with a reference; return "" if it is right or only imprecise."""
        settled, _ = apply_empty_row_convention(reference.observe(output), reference, self.convention)
        found, _ = output_error(settled.output, reference)
        if found.grade is not CheckVerdict.wrong:
            return ""
        size = "not finite" if found.error is None else f"off by {found.error:.3g} (tolerance {found.allowed:.3g})"
        workload = reference.workload
        at = f"at batch_size={workload.batch_size}, seq_len={workload.seq_len} and kv_len={workload.kv_len}"
        at = f"at batch={workload.batch}" if workload.requests else at
        return f"{at} its output is wrong: {size}"


@rule("right when short", *USUAL, "square")
def _right_when_short(candidate: Candidate) -> Iterator[Outcome]:
    """Check that the answer is right at the short length; the other rules assume this."""
    yield candidate.off(candidate.usual_output, candidate.normal)


@rule("without gradients", *USUAL)
def _without_gradients(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a call without gradients is right, and that a later call on nearly equal inputs is right, too."""
    yield ""
    if candidate.off(candidate.usual_output, candidate.normal):
        return
    for is_inference in (False, True):  # code may raise in torch.inference_mode
        outputs: list[Tensor] = []
        for reference in (candidate.normal, candidate.right(NEAR)):
            call = candidate.new_call(reference)
            try:
                outputs.append(candidate.output(call, mode=INFERENCE if is_inference else NO_GRAD))
            except Exception as error:
                if not is_inference or isinstance(error, side_effects.SideEffectError):
                    raise
                yield RuleResult(rule="", holds=False, found=f"in torch.inference_mode {words(error)}", is_noted=True)
                return
            if found := candidate.off(outputs[-1], reference):
                is_kept = len(outputs) > 1 and torch.equal(*outputs)
                mode = "inference_mode" if is_inference else "no_grad"
                yield KEPT if is_kept else f"without gradients (torch.{mode}), {found}"


@rule("training mode", *USUAL)
def _training_mode(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a module with dropout 0 gives the same answer in training mode as in evaluation mode."""
    if candidate.workload.scope == "attention" or candidate.workload.direction == "inference":
        return
    outcome = candidate.compare("after module.train(), with dropout 0, it gives", candidate.answer, is_training=True)
    if isinstance(outcome, str) and outcome:
        once, again = (candidate.call(is_training=True) for _ in range(2))
        if distance(once, again) > candidate.normal.tolerance("output"):  # roundings may follow the order of threads
            found = "something random is active after module.train(), besides dropout: not compared"
            outcome = RuleResult(rule="", holds=False, found=found, is_noted=True)
    yield outcome


@rule("another mask", "scope", "direction", "way", "padded")
def _another_mask(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a call with another mask of the same sizes is right after a call with the workload's mask.

    The other mask is the first of `_other_masks` under which a single call is right. It is passed as a new tensor and,
    in scope `attention`, also written into the tensor of the call before, as services with a captured graph do.
    """

    def answer(*masks: str, form: str = "") -> Tensor:
        call = candidate.new_call()
        for mask in masks:
            changed = dataclasses.replace(call, workload=msgspec.structs.replace(candidate.workload, mask=mask))
            output = candidate.output(changed.under(form=form))
        return output

    own = candidate.workload.mask
    for mask in _other_masks(candidate.workload):
        workload = msgspec.structs.replace(candidate.workload, mask=mask)
        if candidate.caller.unsupported(workload) or workload.operands != candidate.workload.operands:
            continue
        reference = Reference(workload, candidate.normal.drawn, candidate.normal.seed, has_gradients=False)
        try:
            alone = answer(mask)
        except Exception:  # noqa: BLE001, S112 - it takes no such mask
            continue
        if candidate.off(alone, reference):
            if not mask.startswith("padding(") or candidate.off(alone, candidate.normal):  # it may take no such mask
                continue
            found = f"it answers under the mask {own} of earlier calls: is a mask kept by its shape?"
            yield f"under the mask {mask} {found}"
            return
        for form in ("", memory.WRITTEN) if workload.scope == "attention" else ("",):  # modules get no form
            kept = "without a look at its _version" if form else "by its shape"
            output = answer(own, mask, form=form)
            found = candidate.off(output, reference)
            if found and not candidate.off(output, candidate.normal):
                found = f"it answers under the mask {own} of the call before: is a mask kept {kept}?"
            where = f", {form}" * bool(form)
            yield found and f"under the mask {mask}{where}, after a call of the same sizes under another one, {found}"
        return


def _other_masks(workload: Workload) -> Iterator[str]:
    """Yield masks that code for this workload may support: padding with lengths in reverse order, then other kinds."""
    rule, sizes = workload.mask_rule, (workload.batch_size, workload.seq_len, workload.kv_len)
    if isinstance(rule, Padding):
        yield f"padding({','.join(map(str, rule.lengths(*sizes)[::-1]))})"
    for mask in ("causal", "none", "padding"):
        with contextlib.suppress(ValueError):
            if msgspec.structs.replace(workload, mask=mask).mask_rule.num_visible(*sizes) != rule.num_visible(*sizes):
                yield mask


def takes_context(caller: Implementation | Caller, workload: Workload) -> bool:
    """Return whether a module can attend to a context: whether it supports a context with S != T."""
    if workload.scope != "module" or workload.rotary != "none":
        return False
    try:
        mask = str(workload.mask_rule.at_other_length())
        longer = msgspec.structs.replace(workload, kv_len=workload.kv_len + 1, mask=mask)
        return workload.kv_len != workload.seq_len or caller.unsupported(longer) is None
    except Exception:  # noqa: BLE001 - there is no such mask, or foreign code fails
        return False


@rule("another context", "scope", "direction")
def _another_context(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a module that takes a context attends to it, even if the context has as many tokens as the input."""
    workload, seed = candidate.workload, candidate.normal.seed
    if workload.seq_len != workload.kv_len or not takes_context(candidate.caller, workload):
        return
    drawn, other = candidate.normal.drawn, draw_normal(workload, seed + 1).tensors["x"]
    inputs = dataclasses.replace(drawn, tensors=drawn.tensors | {"context": other})
    reference = Reference(workload, inputs, seed, has_gradients=False)
    output = candidate.output(candidate.new_call(reference))
    found = candidate.off(output, reference)
    if found and not candidate.off(output, candidate.normal):
        found = "it attends to its own tokens: are these recognised by their shape?"
    yield found and f"with a context of as many tokens, {found}"


@rule("fed in chunks", "scope", "direction", "mask")
def _fed_in_chunks(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a module with a cache is right on a sequence that is fed in chunks, and then on another one.

    The rule applies if T = S and no query sees a later key.
    """
    workload = candidate.workload
    ahead = candidate.seen.any(dim=0).triu(1).any()
    if not candidate.caller.has_cache or workload.seq_len != workload.kv_len or ahead:
        return
    try:
        aligned_at_end(workload.mask_rule)
    except ValueError:
        return
    rest = max(0, workload.seq_len - sum(CHUNKS))
    chunks = (*CHUNKS, *[1] * rest) if workload.seq_len > sum(CHUNKS) else (workload.seq_len - 1, 1)
    for reference in (candidate.right("needles"), candidate.normal):
        tensors = {name: reference.inputs.tensors[name].clone() for name in candidate.tokens}
        output = candidate.call(tensors, chunks=chunks)
        found = candidate.off(output, reference)
        yield found and f"fed in chunks of {CHUNK_WORDS} tokens, {_of_chunks(output, reference, chunks) or found}"


def _of_chunks(output: Tensor, reference: Reference, chunks: tuple[int, ...]) -> str:
    """Explain a wrong output of chunks by wrong visible keys, rotary positions or biases; return "" if none fits."""
    rows = torch.arange(sum(chunks))
    number = torch.arange(len(chunks)).repeat_interleave(torch.tensor(chunks))
    first = (torch.tensor(chunks).cumsum(0) - torch.tensor(chunks))[number][:, None]
    ends = first + torch.tensor(chunks)[number][:, None]
    past, later = rows <= rows[:, None], first > 0
    top_left, alone = rows <= rows[:, None] - first, past & (ends - first == 1)
    seen = {
        "the causal mask of a chunk is aligned at the first key of the cache": top_left,
        "the causal mask of a chunk is aligned at the first key of the cache, unless it is one token": top_left | alone,
        "each chunk is answered as if nothing came before it": past & (rows >= first),
        "queries see all of their chunk, later keys included": rows < ends,
        "queries see all of their chunk, later keys included, unless it is the first": later & (rows < ends) | past,
        "queries see the cache before their chunk, and nothing of the chunk": (rows < first) | ~later & past,
        "the causal mask of a chunk is off by one": rows < rows[:, None],
    }
    mistakes = [
        wrong("", meaning, masked_scores=lambda x, mask, keys=keys: hide(mask.changed(x), keys[mask.rows]))
        for meaning, keys in seen.items()
    ]
    mistakes += _turned_in_chunks(reference.workload, first[:, 0], number, torch.tensor(chunks))
    from_0 = rows - first[:, 0]
    biased = lambda x, mask: hide(oracle.row_mask(reference.workload, from_0[mask.rows]).changed(x), mask.seen)  # noqa: E731
    if any(part.is_additive for part in reference.workload.mask_rule.changes):
        mistakes.append(wrong("", "the bias counts the queries of each later chunk from 0", masked_scores=biased))
    answers = {each.words: reference.answers_of(each, has_gradients=False)["output"] for each in mistakes}
    apart = {words: distance(output, answer) for words, answer in answers.items()}
    nearest = min(apart, key=apart.__getitem__)
    most = min(4 * reference.tolerance("output"), distance(output, reference.expected["output"]) / 4)
    return nearest if apart[nearest] <= most else ""


def _turned_in_chunks(workload: Workload, first: Tensor, number: Tensor, sizes: Tensor) -> Iterator[Mistake]:
    """Yield mistakes whose rotary positions start at 0 in each chunk, or repeat those of the first chunk of equal size.

    `first` (T,) is the position at which each token's chunk begins, and `number` (T,) the chunk's index in `sizes`.
    """
    if workload.rotary == "none":
        return
    own = partial(oracle.rotated, base=workload.rotary_base, is_interleaved=workload.rotary.startswith("inter"))
    alike = (sizes[:, None] == sizes).int().argmax(dim=-1)  # the first chunk of each chunk's size
    begins = sizes.cumsum(0) - sizes
    for meaning, places in {
        "the rotary positions of each later chunk begin at 0 again": torch.arange(len(first)) - first,
        "the rotary positions of a chunk are those of the first chunk of its size": (
            torch.arange(len(first)) - first + begins[alike[number]]
        ),
    }.items():
        turn = lambda heads, at, places=places: own(heads, places[at])  # noqa: E731
        yield wrong("", meaning, scores=partial(turned, workload=workload, turn=turn))


@rule(OUTPUTS_APART, *USUAL)
def _outputs_apart(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a second call leaves the first call's output unchanged, and reads the tensors' new contents."""
    for kind in ("needles", NEAR):  # needles have the same keys, and near inputs differ in every tensor
        call, other = candidate.new_call(), candidate.right(kind)
        first = candidate.caller.call(call)
        with torch.no_grad():  # as users do; this raises the tensor's version, on which a cache may rely
            for name, tensor in call.tensors.items():
                tensor.copy_(other.inputs.tensors[name])
        second = candidate.caller.call(call)
        if first.number in second.overwritten:
            yield "a later call overwrote the output of an earlier one: they share memory"
        if not candidate.off(second.output, other):
            yield ""
        elif not candidate.off(second.output, candidate.normal):
            yield KEPT
        elif not candidate.off(call_candidate(candidate.caller, other).output, other):
            yield "a second call on other values in the same tensors is wrong: something is kept from the first"


@rule("backward passes apart", *USUAL)
def _backwards_apart(candidate: Candidate) -> Iterator[Outcome]:
    """Check that, after two forward calls, each call's backward pass gives the gradients of that call."""

    def wrong(observed: Tensors, reference: Reference) -> list[str]:
        return [each.tensor for each in errors(observed, reference) if each.grade is CheckVerdict.wrong]

    if candidate.grad_output is None:
        return
    both = (candidate.normal, candidate.right("needles"))
    first = candidate.new_call()
    second = dataclasses.replace(first, tensors=candidate.new_call(both[1]).tensors)
    answers = [candidate.caller.call(call) for call in (first, second)]
    for which, answer, reference in zip(("first", "second"), answers, both, strict=True):
        assert reference.grad_output is not None
        made = candidate.caller.pull_back(answer, reference.grad_output.clone())
        names = wrong(reference.at_rows(made), reference)
        is_alone = bool(names) and not wrong(call_candidate(candidate.caller, reference).compared, reference)
        words = f"after two forward calls the backward pass of the {which} gives another {', '.join(names)}"
        yield f"{words}: it reads what belongs to the other call" if is_alone else ""


@rule("gradients apart", *USUAL, may_refuse=True)
def _gradients_apart(candidate: Candidate) -> Iterator[Outcome]:
    """Check that gradients do not depend on strides of the incoming gradient, frozen operands, or earlier passes."""
    if (usual := candidate.grad_output) is None:
        return
    layouts = {
        "one number expanded, as that of a sum,": torch.ones_like(usual[:1, :1, :1]).flatten()[0].expand_as(usual),
        "one row expanded over the queries": usual[..., :1, :].expand_as(usual),
        "spread out in memory": memory.gapped(usual, candidate.alignment_bytes),
    }
    rows = torch.ones_like(candidate.normal.grad_rows)
    ones = Reference(candidate.workload, candidate.normal.drawn, candidate.normal.seed, grad_rows=rows)
    wrong = [
        each.tensor for each in errors(candidate.ask(grad=ones.grad_output), ones) if each.grade is CheckVerdict.wrong
    ]
    yield f"an incoming gradient of ones gives another {', '.join(wrong)}" if wrong else ""
    for kind, grad in layouts.items():
        dense = candidate.ask(grad=grad.contiguous())
        yield candidate.compare(f"an incoming gradient that is {kind} gives", dense, grad=grad)
    every = [*candidate.normal.inputs.tensors, WEIGHTS]
    weights = [WEIGHTS] if candidate.workload.scope == "module" else []
    others = [
        [name] for name in candidate.normal.inputs.tensors if name not in candidate.tokens
    ]  # sinks, learned biases
    groups = [weights, [*candidate.tokens]] if weights else [[name] for name in candidate.tokens]
    for group in [*groups, *others]:
        what = "weights" if group is weights else " and the ".join(group)
        names = {"output", *(f"gradient of {name}" for name in group)}
        names |= {name for name in candidate.answer if group is weights and name.endswith(" weights")}
        needed = {name: each for name, each in candidate.answer.items() if name in names}
        frozen = [name for name in every if name not in group]
        needs = f"{what} alone need{'s' * (len(group) == 1)}"
        yield candidate.compare(f"where the {needs} a gradient, it gives", needed, frozen=frozen)
    yield candidate.compare("a second backward pass of one graph gives", candidate.answer, num_passes=2)


@rule("second derivatives", "scope", "direction", is_noted=True)
def _second_derivatives(candidate: Candidate) -> Iterator[Outcome]:
    """Check that second derivatives are right or raise an error, and do not silently treat a tensor as constant."""
    reference = candidate.normal
    if candidate.grad_output is None or is_half(candidate.workload) or candidate.off(candidate.usual_output, reference):
        return
    along = {name: torch.ones_like(tensor) for name, tensor in candidate.tokens.items()}
    answer = candidate.caller.call(candidate.new_call())
    try:
        actual = candidate.caller.pull_back_twice(answer, candidate.grad_output.clone(), along)
    except Exception as error:  # noqa: BLE001 - a candidate may raise anything
        yield f"it cannot be differentiated twice ({words(error)})"
        return

    def right(dtype: torch.dtype) -> Tensors:
        inputs = reference.drawn.map(lambda tensor: tensor.to(dtype).detach().requires_grad_())
        output = oracle.answer(candidate.workload, inputs, reference.rows, oracle.textbook)
        return _twice({name: inputs.tensors[name] for name in along}, output, reference.grad_rows.to(dtype))

    exact, rounded = right(torch.float64), right(candidate.usual_output.dtype)
    for name, expected in exact.items():
        size = float(expected.abs().max())
        allowed = TWICE * distance(rounded[name], expected) + LEAST_APART * size
        if not (found := distance(actual.get(name, torch.zeros_like(expected)), expected)) <= allowed:
            cure = "torch.autograd.function.once_differentiable makes them an error"
            yield f"second derivatives ({name}) are silently wrong: off by {found:.3g} of {size:.3g}; {cure}"
    yield ""


def _twice(tensors: Mapping[str, Tensor], output: Tensor, grad_output: Tensor) -> Tensors:
    """Compute the derivatives, by name, of the sum of all gradients of `tensors`; they are 0 if autograd gives None."""
    leaves = [*tensors.values()]
    made = pull_back_twice(output, leaves, grad_output, list(map(torch.ones_like, leaves)))
    return {
        name: torch.zeros_like(leaf) if each is None else each.detach()
        for (name, leaf), each in zip(tensors.items(), made, strict=True)
    }


@rule("sizes", "scope", "direction", "dtype")
def _sizes(candidate: Candidate) -> Iterator[Outcome]:
    """Check that gradients scale with the incoming gradient, and that query / c with key * c gives the same output."""
    of_key, _, of_grad = (2.0**power for power in SIZES.get(candidate.workload.dtype, USUAL_SIZES))
    if (usual := candidate.grad_output) is not None:

        def for_small() -> Tensors:
            answer = candidate.ask(grad=usual / of_grad)
            return {name: each if name == "output" else of_grad * each for name, each in answer.items()}

        yield candidate.compare(f"an incoming gradient {of_grad:g} times smaller gives", candidate.answer, for_small)
    if candidate.workload.scope == "attention":
        moved = {"query": candidate.tokens["query"] / of_key, "key": candidate.tokens["key"] * of_key}
        words = f"a query {of_key:g} times smaller, with a key as much larger, gives"
        of_value = of_key if candidate.workload.layout == "value_in_key" else 1.0  # such values grow with their keys
        yield candidate.compare(words, candidate.usual_output, lambda: candidate.call(moved) / of_value)


@rule(LARGE_VALUES, "scope", "direction", "dtype")
def _large_values(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a large factor of one column of the values multiplies this column of the output, and nothing else.

    Values in the column are positive and scores are similar, so sums of exponentials times values are large. In float16
    such sums overflow in much code, so overflow is only noted. If values are part of the keys, both get the factor, and
    the query is 0, so scores do not depend on the keys.
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
        words = f"values {factor[0]:g} times larger give"
        outcome = candidate.compare(words, usual, lambda: candidate.call(large) / factors)
        yield _accepted(RANGE, outcome, NOT_FINITE) if candidate.workload.dtype == "float16" else outcome


@rule("large products", "scope", "direction", "dtype", may_refuse=True)
def _large_products(candidate: Candidate) -> Iterator[Outcome]:
    """Check that the output stays finite if unscaled products of query and key exceed the range of float16.

    The rule does not check whether the output is right.
    """
    if (candidate.workload.scope, candidate.workload.dtype) == ("attention", "float16"):
        large = draw_large(candidate.workload, candidate.normal.seed).tensors
        tensors = {name: large[name].to(candidate.usual_output) for name in ("query", "key")}
        tensors["query"] = tensors["query"] * BEYOND_RANGE
        finite = torch.zeros_like(candidate.usual_output)
        words = "products of query and key above 65504 give"
        outcome = candidate.compare(words, finite, lambda: torch.zeros_like(finite) * candidate.call(tensors))
        yield _accepted(PRODUCTS, outcome, NOT_FINITE)


def _accepted(convention: str, outcome: Outcome, only: str = "") -> Outcome:
    """Convert a violation whose description contains `only` to a note; return other outcomes unchanged.

    The note names `convention`, the accepted difference from SDPA (a key of CONVENTIONS) that explains the violation.
    """
    if isinstance(outcome, str) and outcome and only in outcome:
        return RuleResult(rule="", holds=False, found=outcome, is_noted=True, convention=convention)
    return outcome


@rule("other scales", "scope", "direction", may_refuse=True)
def _other_scales(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a scale of 0 weights all visible keys equally, and that negating both query and scale changes nothing.

    The rule applies if the workload sets a scale. At scale 0, NaN and Inf are ignored: some code multiplies -inf by the
    scale. The query is enlarged, so code that scales after taking a row's maximum fails if the scale is negative.
    """
    if candidate.workload.scale and candidate.workload.scope == "attention":
        query = LARGER * candidate.tokens["query"]
        right, usual = candidate.call({"query": torch.zeros_like(query)}), candidate.call({"query": query})

        def finite() -> Tensor:
            actual = candidate.call(scale=0.0)
            return actual if actual.isfinite().all() else right

        yield candidate.compare("a scale of 0 gives", right, finite)
        scale, words = -candidate.workload.scale, "a negated query with a negated scale gives"
        outcome = candidate.compare(words, usual, tensors={"query": -query}, scale=scale)
        yield _accepted(SIGN, outcome, NOT_FINITE)


@rule("fewer keys", *HIDING, "square", may_refuse=True)
def _fewer_keys(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a call with fewer keys (and, if T = S, fewer queries) is right after a call with more keys.

    Also check a call without gradients after a call with MORE times the keys, which kernels may split into parts.
    """
    workload, seed = candidate.workload, candidate.normal.seed
    if (length := workload.kv_len - FEWER) < 1:
        return
    sizes = {"kv_len": length} | ({"seq_len": length} if workload.seq_len == workload.kv_len else {})
    try:
        fewer = msgspec.structs.replace(workload, **sizes, mask=str(workload.mask_rule.at_other_length()))
        reference = Reference(fewer, draw_normal(fewer, seed), seed, has_gradients=False)
    except ValueError:  # no such mask, or nothing to compare
        return
    candidate.call()
    found = candidate.off(candidate.output(candidate.new_call(reference)), reference)
    yield found and f"after a call with more keys, {found}"
    if workload.longest > LENGTH:  # a longer call may take too long
        return
    long = MORE * workload.kv_len
    for sizes in ({"kv_len": long}, {"kv_len": long, "seq_len": long}):
        try:
            longer = msgspec.structs.replace(workload, **sizes, mask=str(workload.mask_rule.at_other_length()))
            inputs = place(draw_normal(longer, seed), longer)
            candidate.output(call_on(inputs, longer, mode=NO_GRAD))
        except Exception:  # noqa: BLE001, S112 - it does not support these sizes
            continue
        found = candidate.off(candidate.output(candidate.new_call(), mode=NO_GRAD), candidate.normal)
        yield found and f"without gradients, after a call with {long} keys, {found}"
        return


@rule("masks in memory", "scope", "direction", "mask", may_refuse=True)
def _masks_in_memory(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a function reads masks and biases in any layout; gradients of a one-row bias must sum over queries."""
    if not _has_mask(candidate.workload):
        return
    for form in memory.SAME_MASK:
        yield candidate.compare(f"a mask that is {form} gives", candidate.usual_output, form=form)
    if not candidate.compare("", candidate.usual_output, form=memory.OF_TWO_AXES):  # it accepts such a mask
        words = f"a mask {memory.TRANSPOSED_OF_TWO} gives"
        yield candidate.compare(words, candidate.usual_output, form=memory.TRANSPOSED_OF_TWO)
    if candidate.grad_output is not None and candidate.workload.mask_rule.is_learned:
        copied = candidate.ask(form=memory.COPIED_ROW)
        yield candidate.compare(f"a bias that is {memory.ONE_ROW} gives", copied, form=memory.ONE_ROW)


@rule("bias in float32", "scope", "direction", "half", "mask", is_noted=True)
def _wide_bias(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a float32 bias is not rounded to the query's half precision.

    The bias plus a large constant must give the same output; in half precision, the sum would lose digits of the bias.
    """
    workload = candidate.workload
    is_shift = all(part.is_additive for part in workload.mask_rule.changes) and workload.sinks == "none"
    if is_half(workload) and workload.mask_rule.changes_scores and workload.scope == "attention" and is_shift:
        outcome = candidate.compare("a bias in float32 gives", candidate.usual_output, form=memory.RAISED)
        yield "" if isinstance(outcome, Exception) else _accepted(BIAS, outcome)


@rule("minus infinity in a bias", "scope", "direction", "mask", may_refuse=True)
def _minus_infinity(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a bias of -inf at the first keys of a long row hides them, as a number far below every score does."""
    workload, rule = candidate.workload, candidate.workload.mask_rule
    if workload.scope == "module" or rule.hides or not rule.changes_scores:
        return
    long = msgspec.structs.replace(workload, kv_len=2 * memory.FIRST_KEYS)
    if candidate.caller.unsupported(long):
        return
    call = call_on(place(draw_normal(long, candidate.normal.seed), long), long)

    def hidden_by(form: str) -> Tensor:
        return candidate.output(call.under(form=form))

    with contextlib.suppress(Exception):  # the code may not support this length
        words, at_infinity = "a bias of -inf at the first keys gives", partial(hidden_by, memory.AT_INFINITY)
        outcome = candidate.compare(words, hidden_by(memory.FAR_BELOW), at_infinity)
        yield _accepted(MINUS_INFINITY, outcome, NOT_FINITE)


@rule("is_causal with a mask", "scope", "direction", "mask", is_noted=True)
def _causal_and_mask(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a function that gets both is_causal and a mask applies both or raises an error; some code ignores one.

    If the mask has no causal part, is_causal rightly changes the answer, so only side effects are checked.
    """
    rule = candidate.workload.mask_rule
    if candidate.workload.scope == "attention" and rule.without_causal is not None:
        outcome = candidate.compare("is_causal next to a mask gives", candidate.usual_output, form=SPLIT)
        if isinstance(outcome, str) and outcome and any(isinstance(part, Causal) for part in rule.parts):
            both, ones = candidate.call(form=SPLIT), (rule.without_causal, Causal())
            uses_one = any(candidate.compare("", both, rule=each) == "" for each in ones)
            yield _accepted(CAUSAL, outcome) if uses_one else outcome
        else:
            yield outcome if isinstance(outcome, side_effects.SideEffectError) else ""


@rule("masks of heads", *HIDING, "grouped", may_refuse=True)
def _masks_of_heads(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a function handles masks that differ between heads, or raises an error.

    The rule is skipped for causal and padding masks, because code may assume that these are the same in all heads, and
    for code that is wrong even if all heads have the same mask.
    """
    workload = candidate.workload
    if candidate.off(candidate.usual_output, candidate.normal):
        return
    is_alike = workload.mask == "causal" or any(isinstance(part, Padding) for part in workload.mask_rule.parts)
    if _has_mask(workload) and not is_alike and candidate.seen.any(dim=-1).all():
        expected = candidate.usual_output.clone()
        expected[:, 1::2] = candidate.call(form=memory.OF_OTHERS)[:, 1::2]
        outcome = candidate.compare(f"a mask that is {memory.OF_HEADS} gives", expected, form=memory.OF_HEADS)
        yield _accepted(ONE_MASK, outcome)


@rule("layouts", *USUAL, "grouped", "one head", may_refuse=True)
def _layouts(candidate: Candidate) -> Iterator[Outcome]:
    """Check that operands in other memory layouts (transposed, offset, gapped, expanded, shared) give the same answer.

    Each layout is tried in all operands, then a different layout in each operand. Expanded rows, with stride 0, are
    compared with copies. If one tensor is passed as several operands, it must get the sum of their gradients.
    """
    workload, tokens, names = candidate.workload, candidate.tokens, list(memory.LAYOUTS)

    def mixed(turn: int) -> dict[str, str]:
        return {token: names[(place + turn) % len(names)] for place, token in enumerate(tokens)}

    alone = [dict.fromkeys(tokens, name) for name in names]
    for way in (*alone, *map(mixed, range(len(names)))):
        kinds = {*way.values()}
        words = ", ".join(kinds if len(kinds) == 1 else (f"{name} ({token})" for token, name in way.items()))
        tensors = {token: memory.LAYOUTS[name](tokens[token], candidate.alignment_bytes) for token, name in way.items()}
        outcome = candidate.compare(f"inputs that are {words} give", candidate.answer, tensors=tensors)
        yield _of_one(candidate, tensors, words) or outcome if isinstance(outcome, str) and outcome else outcome
    for axes in EXPANDED:
        if along := {name: axis for name, axis in axes.items() if name in tokens}:
            rows = {name: tokens[name].narrow(axis, 0, 1).expand_as(tokens[name]) for name, axis in along.items()}
            copied = candidate.ask({name: tensor.contiguous() for name, tensor in rows.items()})
            words = ", ".join(f"{name} over {AXES[axis]}" for name, axis in along.items())
            yield candidate.compare(f"inputs that are expanded ({words}) give", copied, tensors=rows)
    if workload.scope == "module" or workload.layout == "value_in_key" or workload.head_dim != workload.value_dim:
        return
    alike = [name for name, tensor in tokens.items() if tensor.shape == tokens["key"].shape]
    for axis in (2, 3):
        views = dict(zip(alike, memory.packed([tokens[name] for name in alike], axis), strict=True))
        words = f"inputs that are views of one buffer ({', '.join(alike)}, packed at axis {axis}) give"
        yield candidate.compare(words, candidate.answer, tensors=views)
    one = tokens["key"].clone()
    copies = candidate.ask({name: one.clone() for name in alike})
    grads = [f"gradient of {name}" for name in alike if f"gradient of {name}" in copies]
    total = sum((copies[name].double() for name in grads), torch.zeros(()))
    summed = copies | dict.fromkeys(grads, total)
    yield candidate.compare(f"one tensor as {', '.join(alike)} gives", summed, tensors=dict.fromkeys(alike, one))


def _of_one(candidate: Candidate, tensors: Mapping[str, Tensor], words: str) -> str:
    """Return the violation if only one operand has the layout named `words`; "" if no single operand causes one."""
    for token, tensor in tensors.items() if words in memory.LAYOUTS and len(tensors) > 1 else ():
        outcome = candidate.compare(f"the {token} alone, {words}, gives", candidate.answer, tensors={token: tensor})
        if isinstance(outcome, str) and outcome:
            return outcome
    return ""


def _reached(candidate: Candidate, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> Outcome:
    """Describe the changes of a hidden key or value that reach queries which do not see it; return "" if none does.

    The last key that is hidden from some query is changed and, separately, its value; in scope `module`, the row of
    the context. `changes` maps descriptions to functions of the changed row: (B, G, width), or (B, width) in scope
    `module`.
    """
    hidden = ~candidate.seen & ~candidate.empty[..., None]
    keys = hidden.flatten(end_dim=1).any(dim=0).nonzero()
    leaks = []
    for name, (text, change) in itertools.product(candidate.sources if len(keys) else (), changes.items()):
        key, tensor = int(keys[-1]), candidate.tokens[name].clone()
        tensor[..., key, :] = change(tensor[..., key, :])
        changed, usual = candidate.call({name: tensor}), candidate.usual_output
        changed = torch.where(_along_queries(hidden[..., key], usual), changed, usual)
        if candidate.compare("", usual, partial(torch.clone, changed), least=0.0):
            leaks.append(text.format(name))
    return f"queries are reached by a hidden {', '.join(leaks)}" if leaks else ""


@rule("hidden keys", "scope", "direction", "half", "mask")
def _hidden_keys(candidate: Candidate) -> Iterator[Outcome]:
    """Check that queries which do not see a key get the same output if this key or its value is multiplied by 1 + S.

    This factor shifts the mean of all keys by only about one key, so code that subtracts the mean before rounding loses
    few digits. Leaks that need larger scores show on the probe `large`.
    """
    factor = 1.0 + candidate.workload.kv_len
    yield _reached(candidate, {f"{{}} {factor:g} times as large": lambda row: factor * row})


@rule(HIDDEN_NAN, *HIDING, is_noted=True)
def _hidden_nan(candidate: Candidate) -> Iterator[Outcome]:
    """Check that NaN, Inf or a very large factor on a hidden key or value reaches no query that does not see it.

    The factor is the square root of the dtype's largest number.
    """
    huge = math.sqrt(torch.finfo(TORCH_DTYPES[candidate.workload.dtype]).max)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "NaN in the {}": partial(torch.full_like, fill_value=math.nan),
        "Inf in the {}": partial(torch.full_like, fill_value=math.inf),
        f"a {{}} {huge:.2g} times as large": lambda row: huge * row,
    }
    yield _reached(candidate, changes)


@rule("visible NaN", *HIDING, is_noted=True)
def _visible_nan(candidate: Candidate) -> Iterator[Outcome]:
    """Check that values of NaN give NaN to every query that sees a key; code with nan_to_num, for example, fails."""
    if "value" in candidate.sources:
        answer = candidate.call({"value": torch.full_like(candidate.tokens["value"], math.nan)})
        is_lost = ~answer.isnan().all(dim=-1) & _along_queries(candidate.seen.any(dim=-1), answer)[..., 0]
        yield _accepted(LOST_NAN, "NaN in all values gives numbers" if is_lost.any() else "")


@rule(REPEATABLE, *HIDING, is_noted=True)
def _repeatable(candidate: Candidate) -> Iterator[Outcome]:
    """Check that two calls on the same tensors, in the same memory, give the same answer, bit for bit.

    At other addresses vectorised code splits a sum at other places, so even correct code rounds differently.
    """
    call = candidate.new_call()
    first, second = (candidate.output(call) for _ in range(2))
    apart = distance(first, second)
    yield "" if apart == 0 else f"two calls differ by {apart:.3g}"


@rule("other weights", "scope", "direction")
def _other_weights(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a module called without gradients uses its new weights after an in-place change, as by optimizers."""
    normal = candidate.normal
    if candidate.workload.scope != "module" or not candidate.caller.has_pack:
        return
    drawn = dataclasses.replace(normal.drawn, weights=normal.drawn.weights.map(lambda tensor: tensor.flip(-1)))
    reference = Reference(candidate.workload, drawn, normal.seed, has_gradients=False)
    call = candidate.new_call()
    candidate.output(call, mode=NO_GRAD)
    call.instance.weights = reference.inputs.weights
    # On new tensors, because code may keep what it has computed from a tensor, next to that tensor and its version.
    output = candidate.output(call, mode=NO_GRAD, tensors=candidate.new_call().tensors)
    found = candidate.off(output, reference)
    if found and not candidate.off(output, normal):
        found = "it answers with the weights of the call before: are weights kept without a look at their _version?"
    yield found and f"without gradients, after its weights were changed in place, {found}"


def _has_mask(workload: Workload) -> bool:
    """Return whether functions get a mask or a bias at this workload."""
    return workload.scope == "attention" and (workload.mask_rule.hides or workload.mask_rule.changes_scores)


def _along_queries(marked: Tensor, output: Tensor) -> Tensor:
    """Reshape marks of queries (B, T) so that they broadcast to an output (B, H, T, V) or (B, T, D)."""
    return marked.view(len(marked), *[1] * (output.dim() - 3), -1, 1).to(output.device)


def _values(workload: Workload) -> dict[str, object]:
    """Return a workload's value for each name in `Rule.axes`."""
    rule, direction = workload.mask_rule, workload.direction
    if direction != "inference" and rule.has_empty_rows(workload.batch_size, workload.seq_len, workload.kv_len):
        direction += ", some rows empty"  # then no gradients are compared (see Candidate)
    return workload.axes() | {
        "direction": direction,
        "half": is_half(workload),
        "square": workload.seq_len == workload.kv_len,
        "hides": rule.hides,
        "padded": isinstance(rule, Padding),
        "grouped": workload.num_heads != workload.num_kv_heads,  # key heads are repeated before they reach functions
        "one head": workload.num_heads == 1,
        "way": (
            (workload.page_size > 0, workload.cache_dtype, workload.shared_prefix > 0)
            if workload.requests
            else workload.mask
            if workload.mask in {"none", "causal"}
            else (rule.hides, rule.changes_scores, rule.is_learned),
            workload.sinks,
        ),
    }


def _plain(workload: Workload) -> Workload:
    """Return the workload on which rules run: forward or inference, no dropout, contiguous, and two batch rows or more.

    The layout `value_in_key` is kept. A single batch row is kept if the workload allows only one.
    """
    direction = "inference" if workload.direction == "inference" else "forward"
    layout = workload.layout if workload.layout == "value_in_key" else "contiguous"
    plain = msgspec.structs.replace(workload, direction=direction, layout=layout, dropout=0.0)
    with contextlib.suppress(ValueError):
        return msgspec.structs.replace(plain, batch_size=max(2, workload.batch_size))
    return plain


def examine(
    candidate: Implementation | Caller, asked: References, known: RulesAt, rejects: Collection[str] = ()
) -> tuple[RuleResult, ...]:
    """Try the rules at the short length or, if the candidate does not support it, at the workload's length.

    Rules are properties of attention. `known` contains results at other workloads; new ones are added. A violation of a
    rule in `rejects`, or a behaviour in `rejects` that is otherwise accepted, counts as wrong and is never only noted.
    Return the results of the rules that apply. If an error prevents all rules, return one note, or () for a
    VacuousError.
    """
    whole, caller = asked.workload, caller_of(candidate)
    short = whole.at_length(LENGTH) if whole.longest > LENGTH else whole
    plain, reason = [*map(_plain, (short, whole))], None
    plain += [msgspec.structs.replace(each, batch_size=whole.batch_size) for each in plain]
    for workload in dict.fromkeys(plain):
        values = _values(workload)
        tried = {name: each for name, each in RULES.items() if not workload.requests or name in RULES_OF_BATCHES}
        keys = {name: (name, *map(values.__getitem__, each.axes)) for name, each in tried.items()}
        if names := [name for name, key in keys.items() if key not in known and (name, workload) not in known]:
            try:
                tried_on = Candidate(caller, workload, asked, needs_zeros=EMPTY_ROWS in rejects)
            except Exception as error:  # noqa: BLE001 - it does not support these sizes, or nothing shows there
                reason = error
                continue
            for name in names:
                asked.on_step()
                result = _result(tried_on, name)
                known[(name, workload) if result is None else keys[name]] = result
        results = filter(None, map(known.get, keys.values()))
        return tuple(_rejected(each) if {each.rule, each.convention} & {*rejects} else each for each in results)
    if reason is None or isinstance(reason, VacuousError):
        return ()
    return (RuleResult(rule=NO_RULE, holds=False, found=words(reason), is_noted=True),)


def _rejected(result: RuleResult) -> RuleResult:
    """Return the result with its violation counted as wrong, not as a note or an accepted difference from SDPA."""
    return msgspec.structs.replace(result, is_noted=False, convention="")


def _result(candidate: Candidate, name: str) -> RuleResult | None:
    """Run a rule's trials until one shows a violation; return the rule's result, or None if it does not apply."""
    trials, _, may_refuse, is_noted = RULES[name]
    violated = partial(RuleResult, rule=name, holds=False)
    refusal, is_tried = None, False
    try:
        for outcome in trials(candidate):
            is_tried = True
            if isinstance(outcome, side_effects.SideEffectError):
                return violated(found=str(outcome))
            if isinstance(outcome, RuleResult):
                return msgspec.structs.replace(outcome, rule=name)
            if isinstance(outcome, Exception):
                refusal = refusal or outcome
            elif outcome:
                return violated(found=outcome, is_noted=is_noted)
    except VacuousError:
        return None
    except side_effects.SideEffectError as error:
        return violated(found=str(error))
    except Exception as error:  # noqa: BLE001 - a candidate may raise anything
        refusal = error
    if refusal is not None:
        is_unsupported = type(refusal).__name__ == NotImplementedError.__name__
        if is_unsupported and name in {ANOTHER_BATCH, NEIGHBOURS}:
            return None  # these rules use longer requests, which it need not support
        return violated(found=words(refusal), is_noted=is_noted or may_refuse or is_unsupported)
    return RuleResult(rule=name, holds=True, found="", is_noted=is_noted) if is_tried else None
