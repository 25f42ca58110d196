"""A witness sample: timed calls with separate inputs for each, and a check of some of their outputs.

Each call gets the timed inputs with the signs of some columns flipped. That changes every score, so no answer follows
from an earlier one. A seed determines the columns, so that the judge can derive each call's inputs from the timed ones,
which it draws as the runner does.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from attnbench.checking import oracle
from attnbench.checking.case import Case, Inputs, generator, grad_value, laid_out, output_shape
from attnbench.checking.conventions import settle
from attnbench.checking.diagnosis import describe
from attnbench.checking.probes import VacuousError
from attnbench.checking.reference import SCREENED, FormError, Reference, output_error, require_form
from attnbench.storage.records import Agreement, ProbeResult
from attnbench.workloads.workload import Workload

NUM_ROWS = 8  # query rows for the oracle, besides those that are furthest from an honest evaluation
MOST_WHOLE_PAIRS = 2**20
"""Up to this many scores (B * H * T * S) the oracle computes all rows once for each cell."""
ROWWISE = "gradient of query"
"""The gradient that a few rows of the output's gradient determine exactly, in scope `attention`."""
NUM_EARLIER = 32  # the number of earlier calls whose right answers a wrong output is compared with

Observed = tuple[Callable[[], object], Callable[[Any], Mapping[str, Tensor | None]]]
"""A call, and a function that names its result afterwards (Case.observed_call)."""


def turned(inputs: Inputs, workload: Workload, seed: int, number: int) -> Inputs:
    """The inputs of the call with this number: each column of each tensor gets a random sign."""
    draws = generator(workload.seed, 7, seed, number)
    tensors = {}
    for name, tensor in inputs.tensors.items():
        signs = torch.randint(2, tensor.shape[-1:], generator=draws) * 2 - 1
        tensors[name] = tensor.detach() * signs.to(device=tensor.device, dtype=tensor.dtype)
    return laid_out(replace(inputs, tensors=tensors), workload)


def ready(case: Case, inputs: Inputs, num_calls: int, seed: int) -> list[Observed]:
    """The calls of a witness sample of a case on `inputs`; for direction `backward`, forward passes run here."""
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
    """Check the output of the call with that number; return its error in words, or "".

    `drawn` are the timed float64 inputs. `judge_seed`, which the runner never has, selects the rows that the oracle
    computes; the query is the only gradient compared, at these rows. With `is_thorough` every row of the output is
    compared with an honest evaluation, or at short lengths everything with the oracle. `on_step` is called before each
    part of the oracle's work.
    """
    is_whole = is_thorough and workload.num_scores <= MOST_WHOLE_PAIRS
    num_rows = workload.seq_len if is_whole else min(NUM_ROWS, workload.seq_len)
    rows = torch.tensor(sorted(random.Random(judge_seed).sample(range(workload.seq_len), num_rows)))
    has_backward = workload.direction in {"backward", "forward_backward"}
    has_gradients = has_backward and (is_whole or workload.scope == "attention")
    needed = ["output"] * (workload.direction != "backward")
    needed += [ROWWISE if workload.scope == "attention" else "gradient of x"] * has_backward
    if missing := [name for name in needed if name not in observed]:
        return f"while it was timed: it handed in no {missing[0]}"
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
        errors = []
        if "output" in observed:
            require_form(workload, observed["output"])
            settled, _ = settle(reference.observe(observed["output"]), reference)
            errors.append(output_error(settled.output, reference)[0])
    except VacuousError:
        return ""
    except FormError as broken:
        return f"while it was timed: {broken}"
    for name, tensor in observed.items():
        if name in reference.expected and name != "output" and (is_whole or name == ROWWISE):
            has_rows = name == ROWWISE and tensor.dim() > 1 and tensor.shape[-2] == workload.seq_len
            compared = tensor.index_select(-2, rows) if has_rows else tensor
            if compared.shape != reference.expected[name].shape:
                return f"while it was timed: the {name} has shape {tuple(tensor.shape)}"
            errors.append(reference.tolerances[name].judge(compared))
    if all(each.agrees for each in errors):
        return ""
    wrong = Agreement(oracle=oracle.NAME, probes=(ProbeResult(probe="fresh", tensors=tuple(errors)),))
    has_wrong_output = "output" in observed and not errors[0].agrees
    is_kept = has_wrong_output and _is_kept(drawn, observed["output"], reference, number, seed)
    said = "it returned its answer to an earlier call: " if is_kept else ""
    return f"while it was timed: {said}{describe(wrong)}"


def _is_kept(drawn: Inputs, output: Tensor, reference: Reference, number: int, seed: int) -> bool:
    """Whether an output is right for the timed inputs, or for those of a call shortly before it."""
    workload, earlier = reference.workload, range(number - 1, max(-1, number - 1 - NUM_EARLIER), -1)
    asked = msgspec.structs.replace(workload, direction="inference")
    return any(
        output_error(output, Reference(asked, inputs, seed, rows=reference.rows))[0].agrees
        for inputs in (drawn, *(turned(drawn, workload, seed, call) for call in earlier))
    )
