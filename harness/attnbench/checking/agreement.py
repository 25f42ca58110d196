"""Is an implementation right? Probes and rules first; where it is wrong, what is wrong with it, in words."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from attnbench.checking import dropout_check, oracle, rules
from attnbench.checking.case import Case, fill, set_dropout
from attnbench.checking.deviation import ChangedInputError, error, errors, observe
from attnbench.checking.diagnosis import describe, explain
from attnbench.checking.probes import PROBES, VacuousError
from attnbench.checking.reference import Reference, refer
from attnbench.contract import Implementation
from attnbench.storage.records import Agreement, ProbeResult, RuleResult
from attnbench.timing.prediction import at_length
from attnbench.workloads.workload import Workload

RULES_LEN = 35
"""The rules are tried at this length, which divides by no tile, or at a shorter workload's own."""
RULES_PROBES = ("normal", "needles")


@dataclass(frozen=True, kw_only=True)
class Ground:
    """All that the check of one workload needs, whatever the candidate: the references of every probe.

    They are without dropout, which is checked apart, once what it drops from is right.
    """

    workload: Workload
    seed: int
    references: dict[str, Reference]
    for_rules: dict[str, Reference]
    on_step: Callable[[], object]  # called before each probe, and each known mistake of a diagnosis


def ground(workload: Workload, seed: int, on_step: Callable[[], object] = lambda: None) -> Ground:
    """Ask the oracle about every probe; `on_step` is called before each.

    Raises:
        ValueError: no probe has anything to say here: a check would be vacuous.
    """
    references: dict[str, Reference] = {}
    plain = msgspec.structs.replace(workload, dropout=0.0)
    for probe in PROBES:
        on_step()
        try:
            references[probe] = refer(plain, probe, seed)
        except VacuousError as error:
            told = str(error)
    if not references:
        raise ValueError(told)
    on_step()
    short = at_length(plain, RULES_LEN) if plain.seq_len > RULES_LEN else plain
    return Ground(
        workload=workload, seed=seed, references=references, for_rules=_for_rules(short, seed), on_step=on_step
    )


def _for_rules(workload: Workload, seed: int) -> dict[str, Reference]:
    direction = "inference" if workload.direction == "inference" else "forward"
    forward = msgspec.structs.replace(workload, direction=direction, layout="contiguous", dropout=0.0)
    try:
        return {probe: refer(forward, probe, seed) for probe in RULES_PROBES}
    except VacuousError:
        return {}


def check(grounded: Ground, implementation: Implementation) -> Agreement:
    """Compare an implementation with the references of all probes and try the rules; what it raises passes through."""
    try:
        results = tuple(_probe(grounded, implementation, probe) for probe in grounded.references)
    except ChangedInputError as error:  # what else it gets wrong is shown once it has learnt to leave them alone
        broken = RuleResult(rule="inputs kept", holds=False, found=str(error))
        told = explain(
            implementation,
            {},
            Agreement(oracle=oracle.NAME, probes=(), rules=(broken,)),
            grounded.seed,
            grounded.on_step,
        )
        return Agreement(oracle=oracle.NAME, probes=(), rules=(broken,), diagnosis=told.words, mistakes=told.mistakes)
    found = Agreement(oracle=oracle.NAME, probes=results, rules=_examine(grounded, implementation))
    if found.agrees and grounded.workload.dropout > 0:
        grounded.on_step()
        dropped = dropout_check.examine(implementation, grounded.workload, grounded.seed)
        found = msgspec.structs.replace(found, rules=found.rules + dropped)
    if found.agrees:
        return found
    told = explain(implementation, grounded.references, found, grounded.seed, grounded.on_step)
    return msgspec.structs.replace(found, diagnosis=told.words, mistakes=told.mistakes, step=told.step)


def _probe(grounded: Ground, implementation: Implementation, probe: str) -> ProbeResult:
    grounded.on_step()
    reference = grounded.references[probe]
    return ProbeResult(probe=probe, tensors=errors(observe(implementation, reference), reference))


def _examine(grounded: Ground, implementation: Implementation) -> tuple[RuleResult, ...]:
    """The rules at the short length or, for those that do not take it, at the workload's own."""
    trial = _trial(implementation, grounded.for_rules)
    if trial is None:
        trial = _trial(implementation, _for_rules(grounded.workload, grounded.seed))
    return () if trial is None else rules.examine(trial, grounded.on_step)


def _trial(implementation: Implementation, references: dict[str, Reference]) -> rules.Trial | None:
    """Where there is something to compare, and the candidate takes the workload."""
    if not references:
        return None
    trial = rules.Trial(implementation, *(references[probe] for probe in RULES_PROBES))
    return trial if trial.can_be_called else None


def verify(case: Case, reference: Reference) -> str:
    """Whether a case that is being timed still computes: what is wrong in words, or "" where all is well.

    Other values are put into the very tensors that are timed, and taken out again: who answers from memory is found.
    Under dropout the answer is compared with dropout at 0, and what is dropped is watched beside it.
    """
    dropout = case.workload.dropout
    timed = {name: tensor.detach().clone() for name, tensor in case.tensors.items()}
    try:
        for name, tensor in case.tensors.items():
            fill(tensor, reference.inputs.tensors[name])
        with torch.no_grad():
            if dropout > 0:
                set_dropout(case.module, 0.0)
            output = case.output()
        rows = output.index_select(output.dim() - 2, reference.rows.to(output.device))
        found = error("output", rows, reference)
    finally:
        if dropout > 0:
            set_dropout(case.module, dropout)
        for name, tensor in case.tensors.items():
            fill(tensor, timed[name])
    if found.agrees:
        dropped = dropout_check.still_drops(case) if dropout > 0 else ""
        return f"while it was timed: {dropped}" if dropped else ""
    wrong = Agreement(oracle=oracle.NAME, probes=(ProbeResult(probe="changed", tensors=(found,)),))
    return f"while it was timed: {describe(wrong)}"
