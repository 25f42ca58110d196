"""Check whether an implementation is right with probes and rules, and whether timed calls still are."""

from collections.abc import Collection

import msgspec
import torch

from attnbench.checking import conduct, dropout, oracle, rules
from attnbench.checking.case import Case, set_dropout
from attnbench.checking.conventions import settle
from attnbench.checking.diagnosis import describe, explain
from attnbench.checking.reference import (
    FormError,
    Reference,
    References,
    ask,
    errors,
    output_error,
    require_form,
)
from attnbench.checking.rules import KEPT, OUTPUTS_APART, RulesAt
from attnbench.contract import Implementation
from attnbench.storage.records import EMPTY_ROWS, Agreement, Grade, ProbeResult, RuleResult

GRAPH_USED_UP = "backward through the graph a second time"


def check(references: References, implementation: Implementation) -> Agreement:
    """Compare an implementation with all references, and diagnose it if it is wrong; its exceptions propagate."""
    agreement = compare(references, implementation)
    is_wrong = agreement.grade is Grade.wrong and not implementation.is_approximate
    return explain(references, implementation, agreement) if is_wrong else agreement


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
    workload, on_step = references.workload, references.on_step
    results = list[ProbeResult]()
    has_backward, convention = True, "" if EMPTY_ROWS in rejects else None
    try:
        for probe, reference in references.by_probe.items():
            on_step()
            observation = ask(implementation, reference)
            has_backward &= observation.has_backward
            observation, here = settle(observation, reference, convention)
            convention = here if convention is None else convention
            of_output, wider = output_error(observation.output, reference)
            others = {name: tensor for name, tensor in observation.compared.items() if name != "output"}
            results.append(ProbeResult(probe=probe, tensors=(of_output, *errors(others, reference))))
            for each in (reference, wider):
                each.release()
    except conduct.ConductError as error:
        return _broken(error.rule, str(error))
    except Exception as error:
        if GRAPH_USED_UP in str(error):
            return _broken(OUTPUTS_APART, KEPT)
        raise
    found: tuple[RuleResult, ...] = ()
    # Code that computes float64 in float32 would break rules here, and their results would count in other dtypes.
    is_narrow = workload.dtype == "float64" and not all(each.agrees for probe in results for each in probe.tensors)
    if not (references.is_brief or implementation.is_approximate or is_narrow):
        found = rules.examine(implementation, references, {} if known is None else known, rejects)
    if not has_backward:
        found += (RuleResult(rule="backward", holds=False, found="no backward: checked in inference", is_noted=True),)
    conventions = tuple(filter(None, (convention, *(each.convention for each in found))))
    agreement = Agreement(oracle=oracle.NAME, probes=tuple(results), rules=found, conventions=conventions)
    if agreement.grade is not Grade.wrong and workload.dropout > 0:
        on_step()
        found += dropout.examine(implementation, workload, references.seed)
        agreement = msgspec.structs.replace(agreement, rules=found)
    return agreement


def _broken(rule: str, found: str) -> Agreement:
    """The agreement of a candidate that breaks a rule before anything can be compared."""
    return Agreement(oracle=oracle.NAME, probes=(), rules=(RuleResult(rule=rule, holds=False, found=found),))


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
            conduct.require_faultless(seen)
            require_form(reference.workload, output)
            settled, _ = settle(reference.observe(output), reference)
            compared, _ = output_error(settled.output, reference)
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
