"""Check whether an implementation is right with probes and rules; diagnose it in words if it is wrong."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor

from attnbench.checking import conduct, dropout, oracle, rules
from attnbench.checking.case import Case, set_dropout
from attnbench.checking.conventions import settle
from attnbench.checking.diagnosis import describe, explain
from attnbench.checking.probes import PROBES, VacuousError
from attnbench.checking.reference import (
    FormError,
    Reference,
    ask,
    errors,
    output_error,
    reference_for_probe,
    require_form,
)
from attnbench.checking.rules import KEPT, OUTPUTS_APART, RulesAt
from attnbench.contract import Implementation
from attnbench.storage.records import EMPTY_ROWS, RANGE, Agreement, Grade, ProbeResult, RuleResult
from attnbench.workloads.workload import Workload

GRAPH_USED_UP = "backward through the graph a second time"
BRIEF = ("normal",)
"""Probes of a brief check."""


@dataclass(frozen=True, kw_only=True)
class References:
    """The references of all probes at one workload: everything that a check needs, for any candidate.

    The references are without dropout, which is checked separately after everything else is right. With `is_brief` no
    rules are tried.
    """

    workload: Workload
    seed: int
    by_probe: dict[str, Reference]
    is_brief: bool
    on_step: Callable[[], object]  # called before each probe, rule, and known mistake of a diagnosis


def ask_oracle(
    workload: Workload,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
    *,
    is_brief: bool = False,
    left_out: Collection[str] = (),
) -> References:
    """Compute the references of every probe, or only of BRIEF without rules; `on_step` is called before each.

    Probes that show nothing at this workload are left out.

    Raises:
        ValueError: no probe shows anything here, so a check would be vacuous.
    """
    by_probe: dict[str, Reference] = {}
    plain = msgspec.structs.replace(workload, dropout=0.0)
    for probe in BRIEF if is_brief else [each for each in PROBES if each not in left_out]:
        on_step()
        try:
            by_probe[probe] = reference_for_probe(plain, probe, seed, on_step)
            _ = by_probe[probe].screen  # computed here, so that its time does not count for a candidate
        except VacuousError as error:
            reason = str(error)
    if not by_probe:
        raise ValueError(reason)
    return References(workload=workload, seed=seed, by_probe=by_probe, is_brief=is_brief, on_step=on_step)


def check(references: References, implementation: Implementation) -> Agreement:
    """Compare an implementation with the references of all probes and try the rules; its exceptions propagate."""
    agreement = compare(references, implementation)
    is_wrong = agreement.grade is Grade.wrong and not implementation.is_approximate
    return diagnose(references, implementation, agreement) if is_wrong else agreement


def diagnose(references: References, implementation: Implementation, wrong: Agreement) -> Agreement:
    """The agreement of a wrong implementation with its diagnosis; its exceptions propagate."""
    return explain(implementation, references.by_probe, wrong, references.seed)


def compare(
    references: References,
    implementation: Implementation,
    known: RulesAt | None = None,
    *,
    rejects: Collection[str] = (),
) -> Agreement:
    """Compare an implementation with the references of all probes and try the rules; its exceptions propagate.

    If a call changes its inputs or other shared state, that is the only result. `known` holds results of the rules at
    other workloads, which may share their short length; new results are added to it. `rejects` are the members of
    EMPTY_ROWS and HIDDEN_NAN that count as findings here, not as notes or conventions.
    """
    results, earlier = [], list[tuple[Reference, Tensor]]()
    has_backward, convention = True, "" if EMPTY_ROWS in rejects else None
    try:
        for probe, reference in references.by_probe.items():
            references.on_step()
            observation = ask(implementation, reference, on_output=partial(_require_fresh, reference, earlier))
            has_backward &= observation.has_backward
            observation, here = settle(observation, reference, convention)
            convention = here if convention is None else convention
            of_output, wider = output_error(observation.output, reference)
            if of_output.agrees:
                earlier.append((reference, observation.output))
            others = {name: tensor for name, tensor in observation.compared.items() if name != "output"}
            results.append(ProbeResult(probe=probe, tensors=(of_output, *errors(others, reference))))
            for each in (reference, wider):
                each.release()
    except Exception as error:
        if isinstance(error, conduct.ConductError):
            rule, found = error.rule, str(error)
        elif GRAPH_USED_UP in str(error):
            rule, found = OUTPUTS_APART, "an output of an earlier call is returned again: its graph is used up"
        else:
            raise
        broken = RuleResult(rule=rule, holds=False, found=found)
        return Agreement(oracle=oracle.NAME, probes=(), rules=(broken,))
    rule_results: tuple[RuleResult, ...] = ()
    # Code that computes float64 in float32 would break rules here, and their results would count in other dtypes.
    is_narrow = references.workload.dtype == "float64" and not all(
        tensor.agrees for probe in results for tensor in probe.tensors
    )
    if not (references.is_brief or implementation.is_approximate or is_narrow):
        rule_results = _rule_results(references, implementation, {} if known is None else known, rejects)
    if not has_backward:
        rule_results += (
            RuleResult(rule="backward", holds=False, found="no backward: checked in inference", is_noted=True),
        )
    overflows = any(rule.rule == rules.LARGE_VALUES and rule.is_noted and not rule.holds for rule in rule_results)
    conventions = ((convention,) if convention else ()) + (RANGE,) * overflows
    agreement = Agreement(oracle=oracle.NAME, probes=tuple(results), rules=rule_results, conventions=conventions)
    if agreement.grade is not Grade.wrong and references.workload.dropout > 0:
        references.on_step()
        dropout_results = dropout.examine(implementation, references.workload, references.seed)
        agreement = msgspec.structs.replace(agreement, rules=rule_results + dropout_results)
    return agreement


def _require_fresh(reference: Reference, earlier: Sequence[tuple[Reference, Tensor]], output: Tensor) -> None:
    """Raise ConductError if an output is the right answer to an earlier call, and not to this one.

    Its graph belongs to the earlier call too, so its gradients would be wrong or an error. An output with all rows
    equal, such as 0, is another mistake.
    """
    rows = output.flatten(end_dim=-2)
    if (rows == rows[0]).all():
        return
    for before, earlier_output in earlier:
        is_again = torch.equal(output, earlier_output)
        if (
            is_again and not reference.tolerances["output"].judge(before.expected["output"]).agrees
        ):  # otherwise both are right
            raise conduct.ConductError(OUTPUTS_APART, KEPT)


def _rule_results(
    references: References, implementation: Implementation, known: RulesAt, rejects: Collection[str]
) -> tuple[RuleResult, ...]:
    """Try the rules at the short length or, if the candidate does not support it, at the workload's own."""
    seed, on_step, whole = references.seed, references.on_step, references.workload
    short = whole.at_length(rules.LENGTH) if whole.longest > rules.LENGTH else whole
    for workload in dict.fromkeys(map(rules.for_rules, (short, whole))):
        if untried := rules.untried(workload, known):
            try:
                candidate = rules.Candidate(implementation, workload, seed, on_step, needs_zeros=EMPTY_ROWS in rejects)
            except Exception:  # noqa: BLE001, S112 - it does not support this length, or nothing shows there
                continue
            rules.try_rules(candidate, known, untried, on_step)
        found = rules.results_at(workload, known)
        return tuple(
            msgspec.structs.replace(each, is_noted=each.is_noted and each.rule not in rejects) for each in found
        )
    return ()


def verify(case: Case, reference: Reference) -> str:
    """Check a case between timings: return its error in words, or "".

    The timed tensors get other values for this, which exposes memoized answers. With dropout, the answer is compared at
    dropout 0, and the dropped weights are checked separately.
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
