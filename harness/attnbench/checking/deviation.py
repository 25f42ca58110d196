"""What a candidate computes on a probe, and how far that is from the reference."""

import numpy as np
import torch
from torch import Tensor

from attnbench.checking.case import TORCH_DTYPES, Case, build, canonical_gradients, copied, output_shape
from attnbench.checking.reference import Reference
from attnbench.contract import Implementation
from attnbench.storage.records import TensorError
from attnbench.workloads.workload import Workload


class UncheckableError(Exception):
    """The candidate offers no way to compare something that is to be timed; says what."""


class ChangedInputError(ValueError):
    """A call changed the tensors that it was given; says which."""


def observe(implementation: Implementation, reference: Reference) -> dict[str, Tensor]:
    """Output at the reference's rows and, where the direction has them, gradients, by name.

    Raises:
        ValueError: the output has another shape or dtype than it must.
        ChangedInputError: the call changed its inputs.
        UncheckableError: a gradient that is to be timed cannot be compared.
        Exception: whatever the candidate raises.
    """
    workload = reference.workload
    given = copied(reference.inputs, workload)
    case = build(workload, implementation, given)
    with case.grad_mode():
        output = case.output()
    require_form(workload, output)
    rows = reference.rows.to(output.device)
    found = {"output": output.detach().index_select(output.dim() - 2, rows)}
    if reference.grad_output is not None:
        found |= gradients(case, output, reference)
    missing = sorted(set(reference.expected) - set(found))
    if missing and workload.direction in {"backward", "forward_backward"}:
        raise UncheckableError(f"without pack(weights) there is no checking the {', '.join(missing)}")
    for name, tensor in reference.inputs.tensors.items():
        if not torch.equal(tensor, given.tensors[name]):
            raise ChangedInputError(f"the call changed its input {name}")
    return found


def gradients(case: Case, output: Tensor, reference: Reference) -> dict[str, Tensor]:
    """The gradient of each input and, for modules with `pack`, of each canonical weight, by name."""
    leaves = case.leaves
    made = torch.autograd.grad(
        output, list(leaves.values()), reference.grad_output, allow_unused=True, materialize_grads=True
    )
    named = dict(zip(leaves, made, strict=True))
    inputs = case.tensors
    packed = {name.removeprefix("parameter "): value for name, value in named.items() if name not in inputs}
    canonical = canonical_gradients(case.module, reference.inputs, packed)
    found = {name: named[name] for name in inputs} | canonical
    return {f"gradient of {name}": value for name, value in found.items()}


def require_form(workload: Workload, output: Tensor) -> None:
    """Raise ValueError where the output has another shape or dtype than it must."""
    expected = output_shape(workload)
    if tuple(output.shape) != expected:
        raise ValueError(f"the output has shape {tuple(output.shape)}, not {expected}")
    if output.dtype != TORCH_DTYPES[workload.dtype]:
        raise ValueError(f"the output has dtype {output.dtype}, not {workload.dtype}")


def errors(found: dict[str, Tensor], reference: Reference) -> tuple[TensorError, ...]:
    """The error of each tensor; of those whose reference is constant, only those that are not finite."""
    compared = tuple(error(name, tensor, reference) for name, tensor in found.items() if name in reference.expected)
    broken = (name for name, tensor in found.items() if name not in reference.expected and not tensor.isfinite().all())
    return compared + tuple(
        TensorError(
            tensor=name,
            error=None,
            allowed=0.0,
            yardstick_error=0.0,
            rounding_band=0.0,
            worst=(),
            expected=0.0,
            actual=None,
        )
        for name in broken
    )


def allowed(name: str, reference: Reference) -> float:
    """The largest error that a tensor may have."""
    return reference.leniency * (2 * reference.yardstick_errors[name] + reference.rounding_bands[name])


def error(name: str, candidate: Tensor, reference: Reference) -> TensorError:
    """The error of one tensor, with the place and values of the worst element."""
    expected = reference.expected[name]
    actual = candidate.detach().double().cpu()
    distance = (actual - expected).abs()
    comparable = distance.where(distance.isfinite(), torch.inf)
    flat = int(comparable.argmax())
    index = tuple(int(i) for i in np.unravel_index(flat, tuple(expected.shape)))
    if name == "output":  # the second to last index counts chosen rows: name the query itself
        index = (*index[:-2], int(reference.rows[index[-2]]), index[-1])
    off, worst_actual = float(comparable.flatten()[flat]), float(actual.flatten()[flat])
    yardstick, band = reference.yardstick_errors[name], reference.rounding_bands[name]
    return TensorError(
        tensor=name,
        error=off if off < torch.inf else None,
        allowed=allowed(name, reference),
        yardstick_error=yardstick,
        rounding_band=band,
        worst=index,
        expected=float(expected.flatten()[flat]),
        actual=worst_actual if abs(worst_actual) < torch.inf else None,
    )
