"""What the right answer to a probe is, and how far from it an honest answer may be.

The rule: the largest error of a tensor may be twice the largest error that the plain textbook forms make at the
workload's dtype, with the inputs as they are and moved by a rounding, plus one rounding band of the reference. One
evaluation alone may be right by luck, most of all where few values are compared. Source of its shape: the tests of
https://github.com/Dao-AILab/flash-attention; here the band scales with the tensor, so that small gradients are not
waved through.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.checking import oracle
from attnbench.checking.case import TORCH_DTYPES, output_shape, place
from attnbench.checking.inputs import Inputs, generator, shared
from attnbench.checking.probes import PROBES, VacuousError
from attnbench.devices import device
from attnbench.workloads.workload import MATMUL_PRECISIONS, Workload

FLOAT32_BITS = 32
LENIENCY_OF_LARGE = 4.0
"""With large logits a weight near a tie hangs on the last bit of a score: a few draws of an honest error say less."""
BAND_ANCHOR = 0.3
"""The rounding band is taken at this share of the reference's largest value."""

Answer = Callable[[Inputs], Tensor]
"""Inputs to the output at the chosen query rows."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The oracle's answer to one probe: what each tensor should be, and how far off it may be."""

    workload: Workload
    drawn: Inputs  # in float64 on the CPU, rounded to the workload's dtype
    inputs: Inputs  # on the device, in the workload's dtype
    rows: Tensor  # (R,) the query rows that are compared
    grad_rows: Tensor  # the gradient of the output at those rows
    grad_output: Tensor | None  # zero outside the rows, so that every gradient is exact whatever the rows
    expected: dict[str, Tensor]  # float64 on the CPU
    leniency: float  # 1, or how many times more is allowed where an honest error cannot be told from a few draws
    yardstick_errors: dict[str, float]
    rounding_bands: dict[str, float]


def refer(workload: Workload, probe: str, seed: int) -> Reference:
    """Ask the oracle and the textbook form.

    Raises:
        ValueError: the reference is not finite.
        VacuousError: it is constant, so that a comparison would say nothing.
    """
    leniency = LENIENCY_OF_LARGE if probe == "large" else 1.0
    return refer_to(workload, PROBES[probe](workload, seed), seed, leniency)


def refer_to(
    workload: Workload,
    drawn: Inputs,
    seed: int,
    leniency: float = 1.0,
    change: Callable[[oracle.Form], oracle.Form] = lambda form: form,
) -> Reference:
    """The same for inputs that were drawn in any way; `change` alters every form, the oracle's and the yardsticks'."""
    dtype = TORCH_DTYPES[workload.dtype]
    drawn = shared(drawn, workload)  # a probe may have given each head keys and values of its own
    exact = drawn.map(lambda tensor: tensor.to(dtype).double())
    draws = generator(workload.seed, 4, seed)
    rows = oracle.checked_rows(workload, draws)
    *batch, _, width = output_shape(workload)
    grad_rows = torch.randn(*batch, len(rows), width, generator=draws, dtype=torch.float64).to(dtype)
    expected = answers(workload, exact, grad_rows.double(), _asked(workload, rows, change(oracle.attend)))
    if not expected["output"].isfinite().all():
        raise ValueError("the reference output is not finite: nothing can be compared with it")
    if _is_constant(expected["output"]):
        raise VacuousError("the reference output is constant: nothing can be compared with it")
    asked = [_asked(workload, rows, change(form)) for form in oracle.YARDSTICKS]
    bound, scales = oracle.score_bound(workload, exact, rows), scales_of(expected)
    expected = {name: tensor for name, tensor in expected.items() if scales[name] > 0}
    grad_output = None
    if workload.direction != "inference":
        full = torch.zeros(output_shape(workload), dtype=dtype)
        grad_output = full.index_copy(len(batch), rows, grad_rows).to(device(workload.device).torch_device)
    return Reference(
        workload=workload,
        drawn=exact,
        inputs=place(drawn, workload),
        rows=rows,
        grad_rows=grad_rows,
        grad_output=grad_output,
        expected=expected,
        leniency=leniency,
        yardstick_errors=_yardstick_errors(workload, exact, (asked, grad_rows), expected, draws),
        rounding_bands={
            name: rounding_band(tensor, scales[name], workload, bound) for name, tensor in expected.items()
        },
    )


def _yardstick_errors(
    workload: Workload,
    exact: Inputs,
    asked: tuple[list[Answer], Tensor],
    expected: dict[str, Tensor],
    draws: torch.Generator,
) -> dict[str, float]:
    """The largest error of each tensor that an honest form makes, on the inputs as they are and moved by a rounding."""
    forms, grad_rows = asked
    dtype = TORCH_DTYPES[workload.dtype]
    has_own_products = workload.float32_matmul_precision != MATMUL_PRECISIONS[0]  # TF32 is there on the device alone
    where = device(workload.device).torch_device if has_own_products else "cpu"
    rounded = exact.map(lambda tensor: tensor.to(device=where, dtype=dtype))
    moved = exact.map(lambda tensor: _moved(tensor, dtype, draws).to(where))
    honest = [answers(workload, each, grad_rows, form) for each in (rounded, moved) for form in forms]
    made = {name: [largest(each[name].cpu(), tensor) for each in honest] for name, tensor in expected.items()}
    if not all(math.isfinite(error) for errors in made.values() for error in errors):
        raise VacuousError(f"an honest answer overflows {workload.dtype}: nothing can be compared with it")
    return {name: max(errors) for name, errors in made.items()}


def _is_constant(tensor: Tensor) -> bool:
    """Whether every value is the same: so it is for the gradient of a query that sees a single key, which is 0."""
    return bool((tensor == tensor.flatten()[0]).all())


def _moved(exact: Tensor, dtype: torch.dtype, draws: torch.Generator) -> Tensor:
    """The tensor with each value moved by up to one rounding of `dtype`, in `dtype`."""
    share = torch.rand(exact.shape, generator=draws, dtype=exact.dtype) * 2 - 1
    return (exact * (1 + torch.finfo(dtype).eps * share)).to(dtype)


def _asked(workload: Workload, rows: Tensor, form: oracle.Form) -> Answer:
    def answer(inputs: Inputs) -> Tensor:
        return oracle.answer(workload, inputs, rows, form)

    return answer


def answers(workload: Workload, inputs: Inputs, grad_rows: Tensor, answer: Answer) -> dict[str, Tensor]:
    """Output at the rows and, where the direction has gradients, the gradient of each input and canonical weight."""
    if workload.direction == "inference":
        return {"output": answer(inputs)}
    watched = inputs.map(lambda tensor: tensor.detach().requires_grad_())
    output = answer(watched)
    leaves = dict(watched.tensors)
    if workload.scope == "module":
        leaves |= {f"{name} weights": tensor for name, tensor in watched.weights.tensors().items()}
        leaves.pop("key_bias weights", None)  # it moves all scores of a query alike: its gradient is 0 but for rounding
    found = torch.autograd.grad(
        output, list(leaves.values()), grad_rows.to(output.dtype), allow_unused=True, materialize_grads=True
    )
    named = {f"gradient of {name}": tensor for name, tensor in zip(leaves, found, strict=True)}
    return {"output": output.detach()} | {name: tensor.detach() for name, tensor in named.items()}


def rounding_band(reference: Tensor, scale: float, workload: Workload, score_bound: float) -> float:
    """How far rounding may carry a tensor whose terms are of size `scale`, in the workload's dtype.

    One rounding is the largest change that adding and taking away a share of the scale makes. A sum of n terms in any
    order makes about sqrt(n) of them, in random directions (N. J. Higham, Accuracy and Stability of Numerical
    Algorithms, section 2.8). A score s, itself a sum of K products, and its row's logsumexp, which is off by two
    roundings, change a weight by (sqrt(K) + 2) |s|.
    Half precision gets one: it is to be summed in float32, and its scores' roundings show in the yardsticks.
    """
    dtype = TORCH_DTYPES[workload.dtype]
    rounded = reference.to(dtype)
    anchor = torch.tensor(BAND_ANCHOR * scale, dtype=dtype)
    moved = (rounded + anchor) - anchor
    least = BAND_ANCHOR * scale * torch.finfo(dtype).eps / 2  # what is added to 0 and taken away again leaves no trace
    one = max(largest(moved, rounded.double()), largest(rounded, reference), least)
    if torch.finfo(dtype).bits < FLOAT32_BITS:
        return one
    in_scores = (math.sqrt(workload.head_dim) + 2) * score_bound
    return one * (math.sqrt(max(workload.seq_len, workload.kv_len)) + in_scores)


def scales_of(expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest value among the tensors of a kind: output, gradients of inputs, gradients of weights.

    Gradients of one kind are sums of terms of one size; where they cancel in one tensor, their roundings remain.
    """
    sizes = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    return {name: max(size for other, size in sizes.items() if _kind(other) == _kind(name)) for name in sizes}


def _kind(name: str) -> tuple[bool, bool]:
    return name.startswith("gradient"), name.endswith("weights")


def largest(candidate: Tensor, reference: Tensor) -> float:
    """The largest difference; NaN where there is one."""
    return float((candidate.double() - reference).abs().max())
