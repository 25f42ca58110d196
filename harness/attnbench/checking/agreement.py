"""Is an implementation right? Probes and rules first; where it is wrong, what is wrong with it, in words."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from attnbench.checking import dropout, oracle, rules
from attnbench.checking.case import Case, set_dropout
from attnbench.checking.diagnosis import describe, explain
from attnbench.checking.probes import PROBES, VacuousError
from attnbench.checking.reference import (
    ChangedInputError,
    Reference,
    error,
    errors,
    observe,
    reference_for_probe,
)
from attnbench.contract import Implementation
from attnbench.storage.records import Agreement, ProbeResult, RuleResult
from attnbench.workloads.workload import Workload

RULES_LEN = 35
"""The rules are tried at this length, which no tile divides, or at a shorter workload's own."""


@dataclass(frozen=True, kw_only=True)
class References:
    """The references of every probe at one workload: all that its check needs, whatever the candidate.

    They are without dropout, which is checked apart when all else is right.
    """

    workload: Workload
    seed: int
    by_probe: dict[str, Reference]
    for_rules: dict[str, Reference]
    on_step: Callable[[], object]  # called before each probe, rule, and known mistake of a diagnosis


def ask_oracle(workload: Workload, seed: int, on_step: Callable[[], object] = lambda: None) -> References:
    """Compute the references of every probe; `on_step` is called before each.

    Raises:
        ValueError: no probe has anything to say here: a check would be vacuous.
    """
    by_probe: dict[str, Reference] = {}
    plain = msgspec.structs.replace(workload, dropout=0.0)
    for probe in PROBES:
        on_step()
        try:
            by_probe[probe] = reference_for_probe(plain, probe, seed)
        except VacuousError as error:
            reason = str(error)
    if not by_probe:
        raise ValueError(reason)
    on_step()
    short = plain.at_length(RULES_LEN) if plain.seq_len > RULES_LEN else plain
    for_rules = _references_for_rules(short, seed)
    return References(workload=workload, seed=seed, by_probe=by_probe, for_rules=for_rules, on_step=on_step)


def _references_for_rules(workload: Workload, seed: int) -> dict[str, Reference]:
    direction = "inference" if workload.direction == "inference" else "forward"
    forward = msgspec.structs.replace(workload, direction=direction, layout="contiguous", dropout=0.0)
    try:
        return {probe: reference_for_probe(forward, probe, seed) for probe in ("normal", "needles")}
    except VacuousError:
        return {}


def check(references: References, implementation: Implementation) -> Agreement:
    """Compare an implementation with the references of all probes and try the rules; what it raises passes through."""
    agreement = _compare(references, implementation)
    if agreement.agrees:
        return agreement
    return explain(implementation, references.by_probe, agreement, references.seed, references.on_step)


def _compare(references: References, implementation: Implementation) -> Agreement:
    """The results of probes and rules; where the call changes its inputs, only that."""
    results = []
    try:
        for probe, reference in references.by_probe.items():
            references.on_step()
            tensors = errors(observe(implementation, reference), reference)
            results.append(ProbeResult(probe=probe, tensors=tensors))
    except ChangedInputError as changed:
        broken = RuleResult(rule="inputs kept", holds=False, found=str(changed))
        return Agreement(oracle=oracle.NAME, probes=(), rules=(broken,))
    rule_results = _try_rules(references, implementation)
    agreement = Agreement(oracle=oracle.NAME, probes=tuple(results), rules=rule_results)
    if agreement.agrees and references.workload.dropout > 0:
        references.on_step()
        dropout_results = dropout.examine(implementation, references.workload, references.seed)
        agreement = msgspec.structs.replace(agreement, rules=rule_results + dropout_results)
    return agreement


def _try_rules(references: References, implementation: Implementation) -> tuple[RuleResult, ...]:
    """The rules at the short length or, for a candidate that does not support it, at the workload's own."""
    for short in (references.for_rules, None):
        by_probe = short or _references_for_rules(references.workload, references.seed)
        if by_probe:
            try:
                candidate = rules.Candidate(implementation, *by_probe.values())
            except Exception:  # noqa: BLE001, S112 - it does not take this length
                continue
            return rules.examine(candidate, references.on_step)
    return ()


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
            output = case.output()
            rows = output.index_select(output.dim() - 2, reference.rows.to(output.device))
            compared = error("output", rows, reference)
    finally:
        if share > 0:
            set_dropout(case.module, share)
    if compared.agrees:
        trouble = dropout.still_drops(case) if share > 0 else ""
    else:
        wrong = Agreement(oracle=oracle.NAME, probes=(ProbeResult(probe="changed", tensors=(compared,)),))
        trouble = describe(wrong)
    return f"while it was timed: {trouble}" if trouble else ""
