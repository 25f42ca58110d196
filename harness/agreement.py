"""Is an implementation right? Output and gradients against the float64 oracle, within what the dtype can do.

The rule: the largest error of a tensor may be twice the largest error that the plain textbook forms make at the
workload's dtype, with the inputs as they are and moved by a rounding, plus one rounding band of the reference. One
evaluation alone may be right by luck, most of all where few values are compared. Source of its shape: the tests of https://github.com/Dao-AILab/flash-attention;
here the band scales with the tensor, so that small gradients are not waved through.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness import oracle
from harness.case import TORCH_DTYPES, Case, build, canonical_gradients, place
from harness.contract import Implementation
from harness.inputs import PROBES, Inputs, generator
from harness.records import Agreement, ProbeResult, TensorError, Workload

FLOAT32_BITS = 32
BAND_ANCHOR = 0.3
"""The rounding band is taken at this share of the reference's largest value."""


class UncheckableError(Exception):
    """The candidate offers no way to compare something that is to be timed; says what."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The oracle's answer to one probe: what each tensor should be, and how far off it may be."""

    inputs: Inputs  # on the device, in the workload's dtype
    rows: Tensor  # (R,) the query rows that are compared
    grad_output: Tensor | None  # zero outside the rows, so that every gradient is exact whatever the rows
    expected: dict[str, Tensor]  # float64 on the CPU
    yardstick_errors: dict[str, float]
    rounding_bands: dict[str, float]


def refer(workload: Workload, probe: str, seed: int) -> Reference:
    """Ask the oracle and the textbook form.

    Raises:
        ValueError: the reference is constant or not finite, so that a comparison would say nothing.
    """
    drawn = PROBES[probe](workload, seed)
    dtype = TORCH_DTYPES[workload.dtype]
    rounded = drawn.map(lambda tensor: tensor.to(dtype))
    draws = generator(workload.seed, 4, seed)
    rows = oracle.checked_rows(workload, draws)
    exact = rounded.map(lambda tensor: tensor.double())
    shape = oracle.answer(workload, exact, rows).shape
    grad_rows = torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype)
    expected = _answers(workload, exact, rows, grad_rows.double(), oracle.attend)
    if not expected["output"].isfinite().all() or _is_constant(expected["output"]):
        raise ValueError("the reference output is constant or not finite: nothing can be compared with it")
    expected = {name: tensor for name, tensor in expected.items() if not _is_constant(tensor)}
    moved = exact.map(lambda tensor: _moved(tensor, dtype, draws))
    honest = [
        _answers(workload, each, rows, grad_rows, form) for each in (rounded, moved) for form in oracle.YARDSTICKS
    ]
    bound, scales = oracle.score_bound(workload, exact, rows), _scales(expected)
    grad_output = None
    if workload.direction != "inference":
        token_dim = len(shape) - 2
        full = torch.zeros(*shape[:token_dim], workload.seq_len, shape[-1], dtype=dtype)
        grad_output = full.index_copy(token_dim, rows, grad_rows).to(workload.device)
    return Reference(
        inputs=place(drawn, workload),
        rows=rows,
        grad_output=grad_output,
        expected=expected,
        yardstick_errors={
            name: max(_largest(answers[name], tensor) for answers in honest) for name, tensor in expected.items()
        },
        rounding_bands={
            name: rounding_band(tensor, scales[name], workload, bound) for name, tensor in expected.items()
        },
    )


def _is_constant(tensor: Tensor) -> bool:
    """Whether every value is the same: so it is for the gradient of a query that sees a single key, which is 0."""
    return bool((tensor == tensor.flatten()[0]).all())


def _moved(exact: Tensor, dtype: torch.dtype, draws: torch.Generator) -> Tensor:
    """The tensor with each value moved by up to one rounding of `dtype`, in `dtype`."""
    share = torch.rand(exact.shape, generator=draws, dtype=exact.dtype) * 2 - 1
    return (exact * (1 + torch.finfo(dtype).eps * share)).to(dtype)


def _answers(
    workload: Workload, inputs: Inputs, rows: Tensor, grad_rows: Tensor, form: oracle.Form
) -> dict[str, Tensor]:
    """Output at the rows and, where the direction has gradients, the gradient of each input and canonical weight."""
    if workload.direction == "inference":
        return {"output": oracle.answer(workload, inputs, rows, form)}
    watched = inputs.map(lambda tensor: tensor.detach().requires_grad_())
    output = oracle.answer(workload, watched, rows, form)
    leaves = dict(watched.tensors)
    if workload.scope == "module":
        leaves |= {f"{name} weights": tensor for name, tensor in watched.weights.tensors().items()}
        leaves.pop("key_bias weights", None)  # it moves all scores of a query alike: its gradient is 0 but for rounding
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_rows)
    named = {f"gradient of {name}": tensor for name, tensor in zip(leaves, gradients, strict=True)}
    return {"output": output.detach()} | {name: tensor.detach() for name, tensor in named.items()}


def rounding_band(reference: Tensor, scale: float, workload: Workload, score_bound: float) -> float:
    """How far rounding may carry a tensor whose terms are of size `scale`, in the workload's dtype.

    One rounding is the largest change that adding and taking away a share of the scale makes. A sum of n terms in any
    order makes about sqrt(n) of them, in random directions (N. J. Higham, Accuracy and Stability of Numerical
    Algorithms, section 2.8). A score s and its row's logsumexp, each off by two roundings, change a weight by 4 |s|.
    Half precision gets one: it is to be summed in float32, and its scores' roundings show in the yardsticks.
    """
    dtype = TORCH_DTYPES[workload.dtype]
    rounded = reference.to(dtype)
    anchor = torch.tensor(BAND_ANCHOR * scale, dtype=dtype)
    moved = (rounded + anchor) - anchor
    one = max(_largest(moved, rounded.double()), _largest(rounded, reference))
    if torch.finfo(dtype).bits < FLOAT32_BITS:
        return one
    return one * (math.sqrt(max(workload.seq_len, workload.kv_len)) + 4 * score_bound)


def _scales(expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest value among the tensors of a kind: output, gradients of inputs, gradients of weights.

    Gradients of one kind are sums of terms of one size; where they cancel in one tensor, their roundings remain.
    """
    sizes = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    return {name: max(size for other, size in sizes.items() if _kind(other) == _kind(name)) for name in sizes}


def _kind(name: str) -> tuple[bool, bool]:
    return name.startswith("gradient"), name.endswith("weights")


def _largest(candidate: Tensor, reference: Tensor) -> float:
    return float((candidate.double() - reference).abs().max())


def check(workload: Workload, implementation: Implementation, references: dict[str, Reference]) -> Agreement:
    """Compare an implementation with the references of all probes; what it raises passes through."""
    results = tuple(
        ProbeResult(probe=probe, tensors=_compare(workload, implementation, reference))
        for probe, reference in references.items()
    )
    agreement = Agreement(oracle=oracle.NAME, probes=results)
    if agreement.agrees:
        return agreement
    return Agreement(oracle=oracle.NAME, probes=results, diagnosis=_describe(agreement))


def _compare(workload: Workload, implementation: Implementation, reference: Reference) -> tuple[TensorError, ...]:
    given = reference.inputs.map(lambda tensor: tensor.clone())
    case = build(workload, implementation, given)
    with case.grad_mode():
        output = case.output()
    found = {"output": output}
    if reference.grad_output is not None:
        leaves = case.leaves
        gradients = torch.autograd.grad(output, list(leaves.values()), reference.grad_output, allow_unused=True)
        zeros = [leaf.new_zeros(leaf.shape) for leaf in leaves.values()]
        made: list[Tensor | None] = list(gradients)  # None for a leaf that the output does not depend on
        filled = [zero if tensor is None else tensor for zero, tensor in zip(zeros, made, strict=True)]
        named = dict(zip(leaves, filled, strict=True))
        found |= {f"gradient of {name}": named[name] for name in given.tensors}
        packed = {name.removeprefix("parameter "): value for name, value in named.items() if name not in given.tensors}
        canonical = canonical_gradients(case.module, given, packed)
        found |= {f"gradient of {name}": value for name, value in canonical.items()}
    expected_shape = _full_shape(workload)
    if output.shape != expected_shape:
        raise ValueError(f"the output has shape {tuple(output.shape)}, not {tuple(expected_shape)}")
    if output.dtype != TORCH_DTYPES[workload.dtype]:
        raise ValueError(f"the output has dtype {output.dtype}, not {workload.dtype}")
    for name, tensor in reference.inputs.tensors.items():
        if not torch.equal(tensor, given.tensors[name]):
            raise ValueError(f"the call changed its input {name}")
    kept = output.detach().clone()
    for tensor in case.tensors.values():
        tensor.data.neg_()  # so that a later call has another answer
    with torch.no_grad():
        case.output()
    if not torch.equal(kept.nan_to_num(), output.detach().nan_to_num()):
        raise ValueError("a later call overwrote the output of an earlier one: they share memory")
    found["output"] = kept.index_select(kept.dim() - 2, reference.rows.to(kept.device))
    _require_weight_gradients(workload, reference, found)
    return tuple(_error(name, tensor, reference) for name, tensor in found.items() if name in reference.expected)


def _require_weight_gradients(workload: Workload, reference: Reference, found: dict[str, Tensor]) -> None:
    """Where a backward pass is to be timed, every gradient that it makes must have been compared."""
    missing = sorted(set(reference.expected) - set(found))
    if missing and workload.direction in {"backward", "forward_backward"}:
        raise UncheckableError(f"without pack(weights) there is no checking the {', '.join(missing)}")


def verify(case: Case, reference: Reference) -> str:
    """Whether a case that is being timed still computes: what is wrong in words, or "" where all is well.

    Other values are put into the very tensors that are timed, and taken out again: who answers from memory is found.
    """
    timed = {name: tensor.detach().clone() for name, tensor in case.tensors.items()}
    try:
        for name, tensor in case.tensors.items():
            tensor.data.copy_(reference.inputs.tensors[name])  # .data: a graph that is kept must not notice
        with torch.no_grad():
            output = case.output()
        rows = output.index_select(output.dim() - 2, reference.rows.to(output.device))
        error = _error("output", rows, reference)
    finally:
        for name, tensor in case.tensors.items():
            tensor.data.copy_(timed[name])
    if error.agrees:
        return ""
    found = Agreement(oracle=oracle.NAME, probes=(ProbeResult(probe="changed", tensors=(error,)),))
    return f"while it was timed: {_describe(found)}"


def _full_shape(workload: Workload) -> torch.Size:
    if workload.scope == "module":
        return torch.Size((workload.batch_size, workload.seq_len, workload.embed_dim))
    return torch.Size((workload.batch_size, workload.num_heads, workload.seq_len, workload.value_dim))


def _error(name: str, candidate: Tensor, reference: Reference) -> TensorError:
    """The error of one tensor, with the place and values of the worst element."""
    expected = reference.expected[name]
    actual = candidate.detach().double().cpu()
    distance = (actual - expected).abs()
    comparable = distance.where(distance.isfinite(), torch.inf)
    flat = int(comparable.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape))
    if name == "output":  # the second to last index counts chosen rows: name the query itself
        index = (*index[:-2], int(reference.rows[index[-2]]), index[-1])
    error, worst_actual = float(comparable.flatten()[flat]), float(actual.flatten()[flat])
    yardstick, band = reference.yardstick_errors[name], reference.rounding_bands[name]
    return TensorError(
        tensor=name,
        error=error if error < torch.inf else None,
        allowed=2 * yardstick + band,
        yardstick_error=yardstick,
        rounding_band=band,
        worst=index,
        expected=float(expected.flatten()[flat]),
        actual=worst_actual if abs(worst_actual) < torch.inf else None,
    )


def _describe(agreement: Agreement) -> str:
    """What is wrong, in words: the tensor that is furthest off, where, and by how much."""
    wrong = [(probe, tensor) for probe, tensor in agreement.tensors() if not tensor.agrees]
    probe, worst = max(wrong, key=lambda item: _severity(item[1]))
    place = ", ".join(map(str, worst.worst))
    actual = "not finite" if worst.actual is None else f"{worst.actual:.6g}"
    value = f"at [{place}] it is {actual}, the oracle says {worst.expected:.6g}"
    size = "not finite" if worst.error is None else f"{worst.error:.3g}"
    others = sorted({tensor.tensor for _, tensor in wrong} - {worst.tensor})
    also = f"; also wrong: {', '.join(others)}" if others else ""
    return f"{worst.tensor} is wrong on {probe} inputs: {value} (error {size}, allowed {worst.allowed:.3g}){also}"


def _severity(tensor: TensorError) -> float:
    if tensor.error is None:
        return float("inf")
    return tensor.error / tensor.allowed if tensor.allowed else float("inf")
