"""Check whether an implementation is right with probes and rules; diagnose it in words if it is wrong."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec
import torch

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
from attnbench.devices import device
from attnbench.storage.records import EMPTY_ROWS, Agreement, Grade, ProbeResult, RuleResult
from attnbench.workloads.workload import Workload

GRAPH_USED_UP = "backward through the graph a second time"
BRIEF = ("normal",)  # probes of a brief check


@dataclass(frozen=True, kw_only=True)
class References:
    """The references of all probes at one workload, without dropout: what a check needs, for any candidate."""

    workload: Workload
    seed: int
    by_probe: dict[str, Reference]
    is_brief: bool  # no rules are tried
    alignment_bytes: int  # of the candidate's device
    on_step: Callable[[], object]  # called before each probe, rule, and known mistake of a diagnosis


def ask_oracle(
    workload: Workload,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
    *,
    is_brief: bool = False,
    is_apart: bool = False,
) -> References:
    """Compute the references of every probe, or only of BRIEF without rules; `on_step` is called before each.

    Probes that show nothing at this workload are left out. If candidates are in another process (`is_apart`), their
    inputs need not be on the workload's device, and small workloads are judged on the host.

    Raises:
        ValueError: no probe shows anything here, so a check would be vacuous.
    """
    by_probe, reason = dict[str, Reference](), ""
    alignment_bytes = device(workload.device).alignment_bytes
    workload = oracle.on_host(workload) if is_apart else workload
    plain = msgspec.structs.replace(workload, dropout=0.0)
    for probe in BRIEF if is_brief else PROBES:
        on_step()
        try:
            by_probe[probe] = reference_for_probe(plain, probe, seed, on_step)
            _ = by_probe[probe].screen  # computed here, so that its time does not count for a candidate
        except VacuousError as error:
            reason = reason or str(error)
    if not by_probe:
        raise ValueError(reason)
    return References(
        workload=workload,
        seed=seed,
        by_probe=by_probe,
        is_brief=is_brief,
        alignment_bytes=alignment_bytes,
        on_step=on_step,
    )


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
        found = rules.examine(
            implementation,
            workload,
            references.seed,
            {} if known is None else known,
            alignment_bytes=references.alignment_bytes,
            rejects=rejects,
            on_step=on_step,
        )
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
            seen.require_faultless()
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
