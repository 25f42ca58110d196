"""Rules that call a result right: those used elsewhere, and ours.

Every rule gets the float64 reference, which is kinder than its own, and every gradient, although most check only the
output. A rule calls a candidate right only if it does so for every tensor.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.case import Inputs, draw_normal, generator
from attnbench.checking import oracle
from attnbench.checking.reference import Reference, answers, largest
from attnbench.workloads.workload import Workload

OURS = "ours"
ONE_PERCENT = 1e-2
HALVES = {"bfloat16", "float16"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """One tensor of a candidate and its reference."""

    found: Tensor  # float64
    expected: Tensor  # float64
    dtype: str
    textbook_error: float  # error of the textbook form in the workload's dtype
    agrees: bool  # by attnbench's rule


Judge = Callable[[Question], bool]


def allclose(atol: float, rtol: float) -> Judge:
    """abs(found - expected) <= atol + rtol * abs(expected), everywhere."""

    def judge(asked: Question) -> bool:
        return torch.allclose(asked.found, asked.expected, rtol=rtol, atol=atol)

    return judge


def by_dtype(asked: Question) -> bool:
    """1e-4 for float32 and float64, 1e-2 for half precision."""
    tolerance = 1e-2 if asked.dtype in HALVES else 1e-4
    return torch.allclose(asked.found, asked.expected, rtol=tolerance, atol=tolerance)


def absolute_and_relative(asked: Question) -> bool:
    """No value is off by more than 1e-2 and by more than 1 % at once."""
    distance = (asked.found - asked.expected).abs()
    bad = ~(distance <= ONE_PERCENT) & ~(distance <= ONE_PERCENT * asked.expected.abs())
    return not bool(bad.any())


def twice_textbook(asked: Question) -> bool:
    """The largest error is at most twice that of the textbook form in the same dtype."""
    return largest(asked.found, asked.expected) <= 2 * asked.textbook_error


JUDGES: dict[str, Judge] = {
    "allclose 1e-2/1e-2": allclose(1e-2, 1e-2),
    "allclose 2e-2/1e-2": allclose(2e-2, 1e-2),
    "allclose 1e-1/1e-2": allclose(1e-1, 1e-2),
    "1e-4, half 1e-2": by_dtype,
    "abs and rel > 1e-2": absolute_and_relative,
    "twice the textbook's error": twice_textbook,
    OURS: lambda asked: asked.agrees,
}
"""Every rule by name; two numbers are the absolute and the relative tolerance."""


def draw_uniform(workload: Workload, seed: int) -> Inputs:
    """Draw values from 0 to 1, as many benchmarks do; the weights of a module are drawn as usual."""
    draws = generator(workload.seed, 7, seed)
    normal = draw_normal(workload, seed)
    tensors = {
        name: torch.rand(tensor.shape, generator=draws, dtype=tensor.dtype) for name, tensor in normal.tensors.items()
    }
    return Inputs(tensors=tensors, weights=normal.weights)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A reference, and the textbook form's error against it for each tensor."""

    reference: Reference
    textbook_errors: dict[str, float]


def bar(reference: Reference) -> Bar:
    """Measure the error of the textbook form."""
    workload, rows = reference.workload, reference.rows
    dtype = reference.inputs.weights.query.dtype
    rounded = reference.drawn.map(lambda tensor: tensor.to(dtype))
    made = answers(
        workload, rounded, reference.grad_rows, lambda inputs: oracle.answer(workload, inputs, rows, oracle.textbook)
    )
    errors = {name: largest(made[name], expected) for name, expected in reference.expected.items()}
    return Bar(reference=reference, textbook_errors=errors)


def verdicts(found: dict[str, Tensor], against: Bar) -> Iterator[tuple[str, bool]]:
    """Apply each rule by name: whether it calls the candidate right."""
    reference = against.reference
    asked = [
        Question(
            found=tensor.detach().double().cpu(),
            expected=reference.expected[name],
            dtype=reference.workload.dtype,
            textbook_error=against.textbook_errors[name],
            agrees=reference.tolerances[name].judge(tensor).agrees,
        )
        for name, tensor in found.items()
        if name in reference.expected
    ]
    for name, judge in JUDGES.items():
        yield name, all(map(judge, asked))
