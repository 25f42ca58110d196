"""Check an implementation with probes (kinds of inputs) and rules (properties of attention), and check timed calls.

With `--referee` (for code that may cheat), some calls of a timing sample are also checked, once the sample is complete.
Each call has its own inputs: the timed inputs with the signs of random columns flipped. This changes every score, so
code cannot reuse an earlier answer. Another process checks the answers; it draws the same inputs, because a seed
determines the columns.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from attnbench.case import Case, Inputs, generator, grad_value, laid_out, output_shape, set_dropout
from attnbench.checking import (
    dropout,
    page_rules,  # noqa: F401 - imported to add its rules to rules.RULES
    rules,
    side_effects,
)
from attnbench.checking.calls import Caller, FormError, caller_of, require_form
from attnbench.checking.diagnosis import describe, explain
from attnbench.checking.probes import PROBES, VacuousError
from attnbench.checking.reference import (
    SCREENED,
    Reference,
    References,
    apply_empty_row_convention,
    call_candidate,
    errors,
    output_error,
)
from attnbench.checking.rules import KEPT, OUTPUTS_APART, RulesAt
from attnbench.contract import Implementation
from attnbench.storage.records import EMPTY_ROWS, Agreement, CheckVerdict, ProbeResult, RuleResult, TensorError
from attnbench.workloads.workload import Workload

GRAPH_USED_UP = "backward through the graph a second time"  # torch's message
NUM_ROWS = 8  # query rows that the oracle computes for a timed call, besides those of `Reference.at_suspects`
MOST_WHOLE_PAIRS = 2**20
"""Up to this many scores (B * H * T * S), a thorough `judge` computes every row with the oracle."""
ROWWISE = "gradient of query"
"""In scope `attention`, row t of this gradient depends on no query but t, so the oracle can compute just a few rows."""
NUM_EARLIER = 32  # a wrong output is compared with the right answers to this many earlier calls

Observed = tuple[Callable[[], object], Callable[[Any], Mapping[str, Tensor | None]]]
"""A function that makes a call, and a function from the call's result to tensors by name: see `Case.observed_call`."""


def check(
    references: References,
    candidate: Implementation | Caller,
    known: RulesAt | None = None,
    rejects: Collection[str] = (),
) -> Agreement:
    """Compare an implementation with the references as `compare` does, and diagnose it if it is wrong.

    The arguments are those of `compare`. An approximate implementation gets no diagnosis. Before the diagnosis, a wrong
    one is also compared with the references of the probes that the argument `turn` of `References` left out.
    """
    caller = caller_of(candidate)
    agreement = compare(references, caller, known, rejects)
    if agreement.grade is not CheckVerdict.wrong or caller.is_approximate:
        return agreement
    whole = references.completed()
    if agreement.probes and (rest := whole.without(references)) is not None:
        with suppress(Exception):  # what it raises there changes nothing: it is wrong
            agreement = _joined(agreement, compare(rest, caller))
    return explain(whole, caller, agreement, rejects)


def _joined(agreement: Agreement, more: Agreement) -> Agreement:
    """Return the agreement with the probes of `more`, in the order of PROBES."""
    by_probe = {each.probe: each for each in (*agreement.probes, *more.probes)}
    probes = tuple(by_probe[probe] for probe in PROBES if probe in by_probe)
    return msgspec.structs.replace(agreement, probes=probes)


def compare(
    references: References,
    candidate: Implementation | Caller,
    known: RulesAt | None = None,
    rejects: Collection[str] = (),
) -> Agreement:
    """Compare an implementation with the references of all probes (kinds of inputs), and try the rules.

    The candidate is an implementation in this process, or the caller of one in another process. If a call changes its
    inputs or other shared state, this violation is the only result. `known` contains results of rules (properties of
    attention) at other workloads: those that apply here are reused (see `RulesAt`), and new results are added.
    Behaviours in `rejects` (values of REJECTABLE) make an implementation wrong; other behaviours of REJECTABLE are only
    noted.

    Raises:
        ValueError: no probe can show anything here, because correct code overflows in the workload's dtype.
        Exception: any other error that the implementation raises.
    """
    workload, on_step, caller = references.workload, references.on_step, caller_of(candidate)
    results = list[ProbeResult]()
    has_backward, convention = True, "" if EMPTY_ROWS in rejects else None
    try:
        for probe, reference in references.by_probe.items():
            on_step()
            observation = call_candidate(caller, reference)
            has_backward &= observation.has_backward
            observation, here = apply_empty_row_convention(observation, reference, convention)
            convention = here if convention is None else convention
            others = {name: tensor for name, tensor in observation.compared.items() if name != "output"}
            try:
                of_output, wider = output_error(observation.output, reference)
                results.append(ProbeResult(probe=probe, tensors=(of_output, *errors(others, reference))))
            except VacuousError as error:
                reference.release()
                if probe == [*references.by_probe][-1] and not results:
                    raise ValueError(str(error)) from None
                continue
            for each in (reference, wider):
                each.release()
    except side_effects.SideEffectError as error:
        return _broken(error.rule, str(error))
    except Exception as error:
        if GRAPH_USED_UP in str(error):
            return _broken(OUTPUTS_APART, KEPT)
        raise
    found: tuple[RuleResult, ...] = ()
    # Code that computes float64 in float32 would break rules here, and `known` would pass that on to other dtypes.
    is_narrow = workload.dtype == "float64" and not all(each.agrees for probe in results for each in probe.tensors)
    if not (references.is_brief or caller.is_approximate or is_narrow):
        found = rules.examine(caller, references, {} if known is None else known, rejects)
    if not has_backward:
        found += (RuleResult(rule="backward", holds=False, found="no backward: checked in inference", is_noted=True),)
    conventions = tuple(filter(None, (convention, *(each.convention for each in found))))
    agreement = Agreement(probes=tuple(results), rules=found, conventions=conventions)
    if agreement.grade is not CheckVerdict.wrong and workload.dropout > 0:
        on_step()
        found += dropout.examine(caller, workload, references.seed)
        agreement = msgspec.structs.replace(agreement, rules=found)
    return agreement


def _broken(rule: str, found: str) -> Agreement:
    """Create the result of a check with a single violation: the candidate broke `rule` in a call."""
    return Agreement(probes=(), rules=(RuleResult(rule=rule, holds=False, found=found),))


def verify(case: Case, reference: Reference) -> str:
    """Check a timed `case` (a module with its inputs) between timings; return a description of its error, or "".

    During the check the timed tensors contain the inputs of `reference`, for which a memoized answer to the timed
    inputs is wrong. With dropout, the output is compared at dropout 0, and `dropout.still_drops` checks the dropout.
    """
    share = case.workload.dropout
    try:
        with case.holding(reference.inputs.tensors), torch.no_grad():
            if share > 0:
                set_dropout(case.module, 0.0)
            with side_effects.watch_call(case.tensors, case.mask) as seen:
                output = case.output()
            side_effects.require_faultless(seen)
            require_form(reference.workload, output)
            settled, _ = apply_empty_row_convention(reference.observe(output), reference)
            compared, _ = output_error(settled.output, reference)
    except (side_effects.SideEffectError, FormError) as broken:
        return f"while it was timed: {broken}"
    finally:
        if share > 0:
            set_dropout(case.module, share)
    trouble = _in_words("changed", compared) or (dropout.still_drops(case) if share > 0 else "")
    return f"while it was timed: {trouble}" if trouble else ""


def _in_words(probe: str, *found: TensorError) -> str:
    """Describe the worst of the errors `found` in a timed call on inputs named `probe`; return "" if all agree."""
    if all(each.agrees for each in found):
        return ""
    return describe(Agreement(probes=(ProbeResult(probe=probe, tensors=found),)))


def turned(inputs: Inputs, workload: Workload, seed: int, number: int) -> Inputs:
    """Return the inputs of call `number` of a timing sample with `seed`: signs of random columns are flipped."""
    draws = generator(workload.seed, 7, seed, number)
    tensors = {}
    for name, tensor in inputs.tensors.items():
        signs = torch.randint(2, tensor.shape[-1:], generator=draws) * 2 - 1
        tensors[name] = tensor.detach() * signs.to(device=tensor.device, dtype=tensor.dtype)
    return laid_out(replace(inputs, tensors=tensors), workload)


def ready(case: Case, inputs: Inputs, num_calls: int, seed: int) -> list[Observed]:
    """Prepare calls (see `Case.observed_call`), each on `inputs` with different signs flipped (see `turned`)."""
    needs_grad = case.workload.direction != "inference"
    calls = []
    for number in range(num_calls):
        tensors = turned(inputs, case.workload, seed, number).tensors
        own = replace(case, tensors={name: each.requires_grad_(needs_grad) for name, each in tensors.items()})
        calls.append(own.observed_call())
    return calls


def judge(  # noqa: PLR0913 - the call, and how it is judged
    workload: Workload,
    drawn: Inputs,
    observed: dict[str, Tensor],
    number: int,
    seed: int,
    *,
    judge_seed: int,
    is_thorough: bool,
    on_step: Callable[[], object] = lambda: None,
) -> str:
    """Check the tensors `observed` from call `number` of a timing sample with `seed`; return the error in words, or "".

    `drawn` are the timed inputs in float64, before signs are flipped. `judge_seed`, which the code under test never
    gets, selects the rows to compare with the oracle: rows of the output and, in scope `attention`, of the query's
    gradient. If `is_thorough`, all rows of all tensors are compared at short lengths; at long lengths, all output rows
    are also compared with a plain textbook evaluation. `on_step` is called before each part of the work.
    """
    is_whole = is_thorough and workload.num_scores <= MOST_WHOLE_PAIRS
    num_rows = workload.seq_len if is_whole else min(NUM_ROWS, workload.seq_len)
    rows = torch.tensor(sorted(random.Random(judge_seed).sample(range(workload.seq_len), num_rows)))
    has_backward = workload.direction in {"backward", "forward_backward"}
    has_gradients = has_backward and (is_whole or workload.scope == "attention")
    needed = ["output"] * (workload.direction != "backward")
    needed += [ROWWISE if workload.scope == "attention" else "gradient of x"] * has_backward
    if missing := [name for name in needed if name not in observed]:
        return f"while it was timed: it returned no {missing[0]}"
    if not has_gradients and "output" not in observed:
        return ""
    asked = workload if has_gradients else msgspec.structs.replace(workload, direction="inference")
    *outer, _, width = output_shape(workload)
    try:
        reference = Reference(
            asked,
            turned(drawn, workload, seed, number),
            judge_seed,
            rows=rows,
            grad_rows=torch.full((*outer, num_rows, width), grad_value(workload)),
            probe=SCREENED if is_thorough and not is_whole else "",
            on_step=on_step,
        )
        found = list[TensorError]()
        if "output" in observed:
            require_form(workload, observed["output"])
            settled, _ = apply_empty_row_convention(reference.observe(observed["output"]), reference)
            found.append(output_error(settled.output, reference)[0])
        found += _gradient_errors(observed, reference, is_whole=is_whole)
    except VacuousError:
        return ""
    except FormError as broken:
        return f"while it was timed: {broken}"
    if not (trouble := _in_words("fresh", *found)):
        return ""
    has_wrong_output = "output" in observed and not found[0].agrees
    is_kept = has_wrong_output and _is_kept(drawn, observed["output"], reference, number, seed)
    said = "it returned its answer to an earlier call: " if is_kept else ""
    return f"while it was timed: {said}{trouble}"


def _gradient_errors(observed: Mapping[str, Tensor], reference: Reference, *, is_whole: bool) -> Iterator[TensorError]:
    """Yield the error of the query's gradient at the reference's rows or, if `is_whole`, errors of every gradient.

    Raises:
        FormError: a gradient has the wrong shape.
    """
    for name, tensor in observed.items():
        if name in reference.expected and name != "output" and (is_whole or name == ROWWISE):
            has_rows = name == ROWWISE and tensor.dim() > 1 and tensor.shape[-2] == reference.workload.seq_len
            compared = tensor.index_select(-2, reference.rows) if has_rows else tensor
            if compared.shape != reference.expected[name].shape:
                raise FormError(f"the {name} has shape {tuple(tensor.shape)}")
            yield reference.judge(name, compared)


def _is_kept(drawn: Inputs, output: Tensor, reference: Reference, number: int, seed: int) -> bool:
    """Return whether an output is right for the timed inputs, or for the inputs of one of NUM_EARLIER earlier calls."""
    workload, earlier = reference.workload, range(number - 1, max(-1, number - 1 - NUM_EARLIER), -1)
    asked = msgspec.structs.replace(workload, direction="inference")

    def is_right_for(inputs: Inputs) -> bool:
        return output_error(output, Reference(asked, inputs, seed, rows=reference.rows))[0].agrees

    return is_right_for(drawn) or any(is_right_for(turned(drawn, workload, seed, call)) for call in earlier)
