"""Is an implementation right? Probes and rules first; where it is wrong, what is wrong with it, in words.

A rule is what any attention obeys whatever its inputs, about hidden keys, memory, layouts and repeated calls: a
function of a `Candidate` that returns in words how the rule is broken, or "". Rules are tried at a short length,
forward only. What PyTorch's own kernels break is only noted (docs/adr/0007).
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from attnbench.checking import conduct, dropout, oracle
from attnbench.checking.case import TORCH_DTYPES, Case, build, set_dropout
from attnbench.checking.conventions import settle
from attnbench.checking.diagnosis import FLOAT32_INSIDE, describe, explain
from attnbench.checking.probes import PROBES, TOKENS, VacuousError, draw_near
from attnbench.checking.reference import (
    FormError,
    Observation,
    Reference,
    ask,
    error,
    errors,
    gradients,
    lacks_backward,
    output_error,
    reference_for_probe,
    require_form,
)
from attnbench.contract import Implementation
from attnbench.storage.records import (
    EMPTY_ROWS,
    FLOAT32,
    HIDDEN_NAN,
    REPEATABLE,
    UNALIGNED,
    Agreement,
    Grade,
    ProbeResult,
    RuleResult,
    TensorError,
)
from attnbench.workloads.workload import Workload

GAP = 3
RULES_LEN = 35
"""The rules are tried at this length, which no tile divides, or at a shorter workload's own."""
GRAPH_USED_UP = "backward through the graph a second time"
BRIEF = ("normal",)
"""Probes of a brief check."""
OUTPUTS_APART, SUM_BACKWARD = "outputs apart", "gradient of a sum"
KEPT = "a second call gives the answer to the inputs of an earlier call"


RulesAt = dict[tuple[object, ...], tuple[RuleResult, ...]]
"""What the rules gave for one implementation, by the kind of workloads at which they were tried: values of axes."""


@dataclass(frozen=True, kw_only=True)
class References:
    """The references of every probe at one workload: all that its check needs, whatever the candidate.

    They are without dropout, which is checked apart when all else is right. With `is_brief` no rules are tried.
    """

    workload: Workload
    seed: int
    by_probe: dict[str, Reference]
    is_brief: bool
    on_step: Callable[[], object]  # called before each probe, rule, and known mistake of a diagnosis

    @property
    def short(self) -> Workload:
        """The workload at which rules are tried."""
        plain = msgspec.structs.replace(self.workload, dropout=0.0)
        return _for_rules(plain.at_length(RULES_LEN) if plain.longest > RULES_LEN else plain)

    @cached_property
    def for_rules(self) -> "RuleReferences | None":
        """The references of the rules, made at first use: workloads share their short lengths."""
        return RuleReferences.ask(self.short, self.seed, self.on_step)


class RuleReferences(NamedTuple):
    """The right answers that rules compare with."""

    normal: Reference
    other: Reference  # on inputs of another kind
    near: Reference  # on the normal inputs with a few numbers changed; the output's gradient is 1 everywhere

    @classmethod
    def ask(cls, workload: Workload, seed: int, on_step: Callable[[], object]) -> "RuleReferences | None":
        """Ask the oracle; None where the right answers are constant."""
        on_step()
        try:
            normal, other = (reference_for_probe(workload, probe, seed, on_step) for probe in ("normal", "needles"))
            return cls(normal, other, Reference(workload, draw_near(workload, seed), seed, grad_value=1.0))
        except VacuousError:
            return None


def ask_oracle(
    workload: Workload,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
    *,
    is_brief: bool = False,
    left_out: Collection[str] = (),
) -> References:
    """Compute the references of every probe, or of BRIEF alone and none for rules; `on_step` is called before each.

    Probes may be left out.

    Raises:
        ValueError: no probe has anything to say here: a check would be vacuous.
    """
    by_probe: dict[str, Reference] = {}
    plain = msgspec.structs.replace(workload, dropout=0.0)
    for probe in BRIEF if is_brief else [each for each in PROBES if each not in left_out]:
        on_step()
        try:
            by_probe[probe] = reference_for_probe(plain, probe, seed, on_step)
            _ = by_probe[probe].screen  # made here, so that its time is no candidate's
        except VacuousError as error:
            reason = str(error)
    if not by_probe:
        raise ValueError(reason)
    return References(workload=workload, seed=seed, by_probe=by_probe, is_brief=is_brief, on_step=on_step)


def _for_rules(workload: Workload) -> Workload:
    direction = "inference" if workload.direction == "inference" else "forward"
    layout = workload.layout if workload.layout == "value_in_key" else "contiguous"
    return msgspec.structs.replace(workload, direction=direction, layout=layout, dropout=0.0)


def check(references: References, implementation: Implementation, earlier: Sequence[Agreement] = ()) -> Agreement:
    """Compare an implementation with the references of all probes and try the rules; what it raises passes through.

    `earlier` are diagnoses of the same implementation at other workloads, which make another one quick.
    """
    compared = compare(references, implementation)
    is_wrong = compared.agreement.grade is Grade.wrong and not implementation.is_approximate
    return diagnose(references, implementation, compared, earlier) if is_wrong else compared.agreement


class Compared(NamedTuple):
    """The results of probes and rules, and the references with the rows that were compared."""

    agreement: Agreement
    by_probe: dict[str, Reference]


def diagnose(
    references: References, implementation: Implementation, compared: Compared, earlier: Sequence[Agreement] = ()
) -> Agreement:
    """Say what is wrong with an implementation that is wrong; one that computes in float32 has a convention."""
    diagnosed = explain(
        implementation, compared.by_probe, compared.agreement, references.seed, references.on_step, earlier=earlier
    )
    others = [rule for rule in diagnosed.broken_rules if rule.rule not in BY_ORACLE]
    if diagnosed.mistakes != (FLOAT32_INSIDE,) or others:
        return diagnosed
    rules = tuple(rule for rule in diagnosed.rules if rule.rule not in BY_ORACLE)  # by the tolerance of float64
    conventions = (*diagnosed.conventions, FLOAT32)
    return msgspec.structs.replace(diagnosed, rules=rules, diagnosis="", mistakes=(), step="", conventions=conventions)


def compare(
    references: References,
    implementation: Implementation,
    known: RulesAt | None = None,
    *,
    rejects: Collection[str] = (),
) -> Compared:
    """Compare an implementation with the references of all probes and try the rules; what it raises passes through.

    Where a call changes what belongs to others, the result is only that. `known` are what the rules gave at other
    workloads, which may share their short length; what they give here is added. `rejects` are those of REJECTABLE that
    are findings here, and no notes or conventions.
    """
    results, by_probe, earlier = [], dict(references.by_probe), list[tuple[Reference, Tensor]]()
    has_backward, convention = True, "" if EMPTY_ROWS in rejects else None
    try:
        for probe, reference in references.by_probe.items():
            references.on_step()
            observation = ask(implementation, reference, on_output=partial(_require_fresh, reference, earlier))
            has_backward &= observation.has_backward
            observation, here = settle(observation, reference, convention)
            convention = here if convention is None else convention
            of_output, by_probe[probe] = output_error(observation.output, reference)
            if of_output.agrees:
                earlier.append((reference, observation.output))
            others = {name: tensor for name, tensor in observation.compared.items() if name != "output"}
            results.append(ProbeResult(probe=probe, tensors=(of_output, *errors(others, reference))))
            for each in (reference, by_probe[probe]):
                each.release()
    except conduct.ConductError as changed:
        broken = RuleResult(rule=changed.rule, holds=False, found=str(changed))
        return Compared(Agreement(oracle=oracle.NAME, probes=(), rules=(broken,)), by_probe)
    except Exception as error:
        if GRAPH_USED_UP not in str(error):
            raise
        again = "an output of an earlier call is returned again: its graph is used up"
        broken = RuleResult(rule="outputs apart", holds=False, found=again)
        return Compared(Agreement(oracle=oracle.NAME, probes=(), rules=(broken,)), by_probe)
    rule_results: tuple[RuleResult, ...] = ()
    if not (references.is_brief or implementation.is_approximate):
        rule_results = _rule_results(references, implementation, {} if known is None else known)
        rule_results = tuple(
            msgspec.structs.replace(each, is_noted=each.is_noted and each.rule not in rejects) for each in rule_results
        )
    if not has_backward:
        rule_results += (
            RuleResult(rule="backward", holds=False, found="no backward: checked in inference", is_noted=True),
        )
    agreement = Agreement(
        oracle=oracle.NAME, probes=tuple(results), rules=rule_results, conventions=(convention,) if convention else ()
    )
    if agreement.grade is not Grade.wrong and references.workload.dropout > 0:
        references.on_step()
        dropout_results = dropout.examine(implementation, references.workload, references.seed)
        agreement = msgspec.structs.replace(agreement, rules=rule_results + dropout_results)
    return Compared(agreement, by_probe)


def _require_fresh(reference: Reference, earlier: Sequence[tuple[Reference, Tensor]], output: Tensor) -> None:
    """Raise ConductError where an output is the right answer to an earlier call, and not to this one.

    Its graph is that of the earlier call, too, so that its gradients would be those, or an error. An output whose
    rows are all alike, such as 0, is another mistake.
    """
    rows = output.flatten(end_dim=-2)
    if (rows == rows[0]).all():
        return
    for before, earlier_output in earlier:
        is_again = torch.equal(output, earlier_output)
        if is_again and not error("output", before.expected["output"], reference).agrees:  # else both are right
            raise conduct.ConductError(OUTPUTS_APART, KEPT)


def _rule_results(references: References, implementation: Implementation, known: RulesAt) -> tuple[RuleResult, ...]:
    """The rules at the short length or, for a candidate that does not support it, at the workload's own.

    They are tried where a workload has a value that none before it had; once a rule is broken, at every other kind.
    Those that are only noted are tried whatever the dtype, and how the mask changes scores.
    """
    short, seed, on_step = references.short, references.seed, references.on_step
    noted = (short.scope, short.direction, short.mask_rule.hides)
    changes = tuple(type(part).__name__ for part in short.mask_rule.changes)
    kind = (*noted, changes, short.dtype, short.bias, short.layout, short.sinks, short.scale)
    if kind not in known and _are_tried(kind, known):
        return known.get(noted, ())
    for workload in dict.fromkeys((short, _for_rules(references.workload))):
        if kind in known:
            break
        right = references.for_rules if workload == short else RuleReferences.ask(workload, seed, on_step)
        if right is None:
            continue
        try:
            candidate = Candidate(implementation, right)
        except Exception:  # noqa: BLE001, S112 - it does not take this length
            continue
        known[kind] = try_rules(candidate, DECIDING, on_step)
        if noted not in known:
            known[noted] = try_rules(candidate, NOTED, on_step)
    return known.get(kind, ()) + known.get(noted, ())


def _are_tried(kind: tuple[object, ...], known: RulesAt) -> bool:
    """Whether the rules held at other kinds of the same scope that together have all values of this one."""
    if any(not each.holds and not each.is_noted for results in known.values() for each in results):
        return False
    others = [other for other in known if len(other) == len(kind) and other[0] == kind[0]]
    return all(any(other[axis] == value for other in others) for axis, value in enumerate(kind))


def try_unaligned(references: References, implementation: Implementation) -> RuleResult:
    """Whether inputs that begin and continue at any place in memory give the same answer; a note, whatever it says.

    On a device that wants them aligned the call may cost its process: see `Device.alignment_bytes`.
    """
    if not references.for_rules:  # at such a workload no rule can say anything
        return RuleResult(rule=UNALIGNED, holds=True, is_noted=True)
    try:
        candidate = Candidate(implementation, references.for_rules)
        found = layouts(candidate, alignment_bytes=1)
    except Exception as error:  # noqa: BLE001 - to refuse is the best that an implementation can do
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return RuleResult(rule=UNALIGNED, holds=not found, found=found, is_noted=True)


def verify(case: Case, reference: Reference) -> str:
    """Whether a case that is being timed still computes: what is wrong in words, or "".

    Meanwhile the tensors that are timed hold other values, so that an answer from memory shows.
    Under dropout the answer is compared with dropout at 0, and what is dropped is checked apart.
    """
    share = case.workload.dropout
    try:
        with case.holding(reference.inputs.tensors), torch.no_grad():
            if share > 0:
                set_dropout(case.module, 0.0)
            with conduct.watched(case.tensors, case.mask) as seen:
                output = case.output()
            seen.require_faultless()
            require_form(reference.workload, output)
            compared, _ = output_error(output, reference)
    except (conduct.ConductError, FormError) as broken:
        return f"while it was timed: {broken}"
    finally:
        if share > 0:
            set_dropout(case.module, share)
    if compared.agrees:
        trouble = dropout.still_drops(case) if share > 0 else ""
    else:
        wrong = Agreement(oracle=oracle.NAME, probes=(ProbeResult(probe="changed", tensors=(compared,)),))
        trouble = describe(wrong)
    return f"while it was timed: {trouble}" if trouble else ""


class Candidate:
    """An implementation at one workload, with its references for two kinds of input."""

    def __init__(self, implementation: Implementation, references: RuleReferences) -> None:
        """Call the implementation on the normal inputs; what it raises passes through."""
        self.implementation = implementation
        self.normal, self.other, self.near = references
        normal = self.normal
        self.conduct = conduct.Conduct()  # of the last call
        self.output = self.call()  # on the normal inputs
        self.first = self.conduct  # of the call on the normal inputs
        self.tolerance = 2 * normal.tolerance("output")  # how far two honest answers on them may be apart
        self.tokens = {name: tensor for name, tensor in normal.inputs.tensors.items() if name in TOKENS}
        self.sources = [name for name in ("key", "value", "context") if name in self.tokens]  # rows of keys
        if normal.workload.layout == "value_in_key":
            self.sources.remove("value")
        self.seen = oracle.row_mask(normal.workload, torch.arange(normal.workload.seq_len)).seen[:, 0]  # (B, T, S)
        if self.settled(self.output, normal)[1]:
            self.seen = self.seen | ~self.seen.any(dim=-1, keepdim=True)  # it may give such queries what it likes
        hidden = (~self.seen).any(dim=0).any(dim=0).nonzero().flatten()
        self.hidden_key = int(hidden[-1]) if len(hidden) else None  # the last key that some query does not see

    @staticmethod
    def settled(
        output: Tensor, reference: Reference, gradients: Mapping[str, Tensor] | None = None
    ) -> tuple[Observation, str]:
        """An answer with the right one for queries that see no key, and the convention that it has for them."""
        rows = output.detach().index_select(-2, reference.rows.to(output.device))
        return settle(Observation(output.detach(), {"output": rows} | dict(gradients or {})), reference)

    def case(self, reference: Reference | None = None) -> Case:
        """A case on fresh copies of the inputs of a reference: of the normal ones where none is named."""
        inputs = (reference or self.normal).inputs
        return build(self.normal.workload, self.implementation, inputs.map(lambda tensor: tensor.clone()))

    def call(self, **changed: Tensor) -> Tensor:
        """The output on the normal inputs, some of them replaced."""
        case = self.case()
        if self.normal.workload.layout == "value_in_key" and "key" in changed:
            changed["value"] = changed["key"][..., : self.normal.workload.value_dim]
        # Without gradients the call would run in another mode than the one that it is compared with.
        needs_grad = self.normal.workload.direction != "inference"
        case.tensors.update({name: tensor.detach().requires_grad_(needs_grad) for name, tensor in changed.items()})
        with conduct.watched(case.tensors, case.mask) as self.conduct, case.grad_mode():
            output = case.output()
        require_form(self.normal.workload, output)
        return output.detach()

    def with_key(self, name: str, key: int, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The output with one key's row of the tensor `name` changed, split as by `split`."""
        tensor = self.normal.inputs.tensors[name].clone()
        tensor[..., key, :] = change(tensor[..., key, :])
        return self.split(self.call(**{name: tensor}), key)

    def split(self, output: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """The rows of an output whose query does not see that key, and those whose query does; each (n, ...)."""
        rows = output.transpose(1, 2) if output.dim() == 4 else output  # noqa: PLR2004 - (B,H,T,V) -> (B,T,H,V)
        sees = self.seen[:, :, key].to(output.device)
        return rows[~sees], rows[sees]


def right_when_short(candidate: Candidate) -> str:
    """The answer is right at the short length, before anything else is said of it there."""
    found = output_error(candidate.settled(candidate.output, candidate.normal)[0].output, candidate.normal)[0]
    if found.grade is not Grade.wrong:
        return ""
    workload = candidate.normal.workload
    return f"at seq_len={workload.seq_len} and kv_len={workload.kv_len} its output is wrong{_off_by(found)}"


def without_gradients(candidate: Candidate) -> str:
    """A call without gradients is right, and so is the next one on inputs that are nearly the same."""
    if right_when_short(candidate):
        return ""
    outputs: list[Tensor] = []
    for reference in (candidate.normal, candidate.near):
        with torch.no_grad():
            outputs.append(candidate.case(reference).output())
        found = output_error(candidate.settled(outputs[-1], reference)[0].output, reference)[0]
        if found.grade is Grade.wrong:
            is_kept = len(outputs) > 1 and torch.equal(*outputs)
            return KEPT if is_kept else f"without gradients (torch.no_grad) its output is wrong{_off_by(found)}"
    return ""


def _off_by(found: TensorError) -> str:
    return (
        ": it is not finite" if found.error is None else f": off by {found.error:.3g} (tolerance {found.allowed:.3g})"
    )


def sum_backward(candidate: Candidate) -> str:
    """The gradient that `out.sum().backward()` hands in, one number expanded with stride 0, is read right."""
    if candidate.near.grad_output is None:
        return ""
    ones = torch.ones((), dtype=candidate.output.dtype, device=candidate.output.device).expand_as(candidate.output)
    wrong: dict[bool, list[str]] = {}
    for is_expanded in (True, False):
        case = candidate.case(candidate.near)
        with case.grad_mode():
            output = case.output()
        given = ones if is_expanded else ones.contiguous()
        found = gradients(case, output, candidate.near, given)
        wrong[is_expanded] = _wrong(candidate.settled(output, candidate.near, found)[0].compared, candidate.near)
        if not wrong[True]:
            return ""
    if wrong[False]:
        return f"where the output's gradient is 1 everywhere, the {', '.join(wrong[False])} is wrong"
    return (
        f"after out.sum().backward(), whose gradient is expanded with stride 0, the {', '.join(wrong[True])} is wrong"
    )


def outputs_apart(candidate: Candidate) -> str:
    """A later call leaves an earlier call's output alone, and answers from what its tensors hold now."""
    case = candidate.case()
    with case.grad_mode():
        first = case.output()
        kept = first.detach().clone()
        for name, tensor in case.tensors.items():
            tensor.data.copy_(candidate.other.inputs.tensors[name])
        second = case.output()
    memory = {tensor.untyped_storage().data_ptr() for tensor in case.tensors.values()}
    is_view = first.untyped_storage().data_ptr() in memory  # of an input, which has other values by now
    if not is_view and not torch.equal(kept.nan_to_num(), first.nan_to_num()):
        return "a later call overwrote the output of an earlier one: they share memory"
    rows = second.index_select(second.dim() - 2, candidate.other.rows.to(second.device))
    if error("output", rows, candidate.other).agrees:
        return ""
    rows = second.index_select(second.dim() - 2, candidate.normal.rows.to(second.device))
    if error("output", rows, candidate.normal).agrees:
        return KEPT
    anew = ask(candidate.implementation, candidate.other).compared["output"]
    if not error("output", anew, candidate.other).agrees:
        return ""
    return "a second call on other values in the same tensors is wrong: something is kept from the first"


def backwards_apart(candidate: Candidate) -> str:
    """After two forward calls, the backward pass of each gives the gradients of its own call."""
    both = (candidate.normal, candidate.other)
    if any(reference.grad_output is None for reference in both):
        return ""
    first = candidate.case()
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in candidate.other.inputs.tensors.items()}
    cases = (first, dataclasses.replace(first, tensors=tensors))
    with first.grad_mode():
        outputs = [case.output() for case in cases]
    for which, case, output, reference in zip(("first", "second"), cases, outputs, both, strict=True):
        wrong = _wrong(gradients(case, output, reference), reference)
        if wrong and not _wrong(ask(candidate.implementation, reference).compared, reference):
            return (
                f"after two forward calls the backward pass of the {which} gives another {', '.join(wrong)}: "
                "it reads what belongs to the other call"
            )
    return ""


def _wrong(observed: dict[str, Tensor], reference: Reference) -> list[str]:
    """The tensors that are wrong, by name."""
    return [each.tensor for each in errors(observed, reference) if each.grade is Grade.wrong]


def conducted(candidate: Candidate, rule: str) -> str:
    """A rule about conduct: a call leaves its inputs, the mask and the seeds alone, and draws no random numbers."""
    return (candidate.first.faults | candidate.first.notes).get(rule, "")


def layouts(candidate: Candidate, alignment_bytes: int = 0) -> str:
    """Tensors that lie in memory in another way give the same answer: transposed, at an offset, with gaps.

    Each lies in another way than the next. They are aligned to this number of bytes, or as the device
    wants it.
    """
    alignment_bytes = alignment_bytes or candidate.case().device.alignment_bytes
    names = list(LAYOUTS)
    alike = [dict.fromkeys(candidate.tokens, name) for name in names]
    mixed = [
        {token: names[(place + turn) % len(names)] for place, token in enumerate(candidate.tokens)}
        for turn in range(len(names))
    ]

    def how_far(way: Mapping[str, str]) -> float:
        changed = {token: LAYOUTS[way[token]](tensor, alignment_bytes) for token, tensor in candidate.tokens.items()}
        return _apart(candidate.call(**changed), candidate.output)

    if all(how_far(way) <= candidate.tolerance for way in mixed):
        return ""
    for way in [*alike, *mixed]:  # the simplest that shows it
        if not (apart := how_far(way)) <= candidate.tolerance:
            one = next(iter(way.values()))
            words = one if way in alike else ", ".join(f"{name} ({token})" for token, name in way.items())
            return (
                f"inputs that are {words} give another answer: off by {apart:.3g} (tolerance {candidate.tolerance:.3g})"
            )
    return ""


def expanded(candidate: Candidate) -> str:
    """A batch that is one row expanded, with stride 0, gives what its copy in memory gives."""
    shared = {name: tensor[:1].expand_as(tensor) for name, tensor in candidate.tokens.items()}
    copied = {name: tensor.contiguous() for name, tensor in shared.items()}
    apart = _apart(candidate.call(**shared), candidate.call(**copied))
    return "" if apart <= candidate.tolerance else f"inputs that are expanded give another answer: off by {apart:.3g}"


def hidden_keys(candidate: Candidate) -> str:
    """What a hidden key and its value hold, as long as it and its scores are finite, moves nothing.

    The poison moves the mean of all keys, or values, by about one of them: who subtracts that mean before it computes
    in finite precision loses little. A leak that takes larger scores to show is one that the large inputs show.
    """
    poison = 1.0 + candidate.normal.workload.kv_len
    if (key := candidate.hidden_key) is None:
        return ""
    for name in candidate.sources:
        hidden, _ = candidate.with_key(name, key, lambda row: poison * row)
        apart = _apart(hidden, candidate.split(candidate.output, key)[0])
        if not apart <= candidate.tolerance:
            return f"the {name} of key {key} moves queries that do not see it by {apart:.3g}"
    return ""


def visible_nan(candidate: Candidate) -> str:
    """NaN in a key or value reaches every query that sees it: it must not be lost.

    A key that is alone has weight 1 whatever its score.
    """
    for name in candidate.sources if candidate.normal.workload.kv_len > 1 else ():
        key = candidate.normal.workload.kv_len // 2
        _, seeing = candidate.with_key(name, key, lambda row: row * math.nan)
        if seeing.numel() and seeing.flatten(1).isfinite().all(dim=1).any():
            return f"NaN in the {name} of a visible key is lost"
    return ""


def hidden_nan(candidate: Candidate) -> str:
    """NaN, Inf or a number near the end of the dtype's range in a hidden key or value stays there."""
    if (key := candidate.hidden_key) is None:
        return ""
    leaks = []
    huge = math.sqrt(torch.finfo(TORCH_DTYPES[candidate.normal.workload.dtype]).max)
    for name in candidate.sources:
        for word, bad in (("NaN", math.nan), ("Inf", math.inf)):
            hidden, _ = candidate.with_key(name, key, partial(torch.full_like, fill_value=bad))
            if not hidden.isfinite().all():
                leaks.append(f"{word} in the {name}")
        hidden, _ = candidate.with_key(name, key, lambda row: huge * row)
        if not _apart(hidden, candidate.split(candidate.output, key)[0]) <= candidate.tolerance:
            leaks.append(f"a {name} {huge:.2g} times as large")
    return f"queries are reached by a hidden {', '.join(leaks)}" if leaks else ""


def repeatable(candidate: Candidate) -> str:
    """The same inputs give the same answer, to the last bit."""
    apart = _apart(candidate.call(), candidate.output)
    return "" if apart == 0 else f"two calls differ by {apart:.3g}"


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where one is finite and the other is not; none where both are not finite."""
    one, other = one.double().cpu(), other.double().cpu()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    return float((one - other).abs().where(one.isfinite(), 0.0).max()) if one.numel() else 0.0


def _transposed(tensor: Tensor, _: int) -> Tensor:
    """The same values with tokens innermost but one, as a projection leaves them."""
    return tensor.mT.contiguous().mT


def _offset(tensor: Tensor, alignment_bytes: int) -> Tensor:
    """The same values, one element after the start of a buffer, or as few as keep the alignment."""
    step = max(1, alignment_bytes // tensor.itemsize)
    buffer = torch.empty(tensor.numel() + step, dtype=tensor.dtype, device=tensor.device)
    return buffer[step:].view(tensor.shape).copy_(tensor)


def _gapped(tensor: Tensor, alignment_bytes: int) -> Tensor:
    """The same values, with tokens before heads and unused numbers between the rows: three, or what alignment needs."""
    moved = tensor.transpose(1, -2)
    step = max(1, alignment_bytes // tensor.itemsize)
    width = -(-(moved.shape[-1] + GAP) // step) * step
    wide = torch.full((*moved.shape[:-1], width), math.nan, dtype=tensor.dtype, device=tensor.device)
    wide[..., : moved.shape[-1]] = moved
    return wide[..., : moved.shape[-1]].transpose(1, -2)


LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "transposed": _transposed,
    "at an offset": _offset,
    "spread out in memory": _gapped,
}
Rule = Callable[[Candidate], str]
DECIDING: dict[str, Rule] = {
    "right when short": right_when_short,
    "without gradients": without_gradients,
    **{rule: partial(conducted, rule=rule) for rule in (conduct.INPUTS, conduct.MASK, conduct.SEED)},
    OUTPUTS_APART: outputs_apart,
    "backward passes apart": backwards_apart,
    SUM_BACKWARD: sum_backward,
    "layouts": layouts,
    "expanded": expanded,
    "hidden keys": hidden_keys,
}
BY_ORACLE = {"right when short", "gradient of a sum", "without gradients"}
"""Rules that compare with the oracle."""
MAY_REFUSE = {"layouts", "expanded", SUM_BACKWARD}
"""An error about a layout is no wrong answer: it is noted."""
NOTED: dict[str, Rule] = {
    "visible NaN": visible_nan,
    HIDDEN_NAN: hidden_nan,
    REPEATABLE: repeatable,
    conduct.DRAWS: partial(conducted, rule=conduct.DRAWS),
}


def try_rules(
    candidate: Candidate, rules: Mapping[str, Rule], on_step: Callable[[], object] = lambda: None
) -> tuple[RuleResult, ...]:
    """Try some rules; what the candidate raises breaks a rule. `on_step` is called before each."""
    results = []
    for name, rule in rules.items():
        on_step()
        is_noted = name in NOTED
        try:
            broken = rule(candidate)
        except Exception as error:  # noqa: BLE001 - whatever the candidate raises
            is_refused = type(error).__name__ == NotImplementedError.__name__
            broken = "" if lacks_backward(error) else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            is_noted = name in NOTED or name in MAY_REFUSE or is_refused
        results.append(RuleResult(rule=name, holds=not broken, found=broken, is_noted=is_noted))
    return tuple(results)
