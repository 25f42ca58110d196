"""Rules that decide whether a result is right: those of other projects, and ours.

Every rule gets the reference in float64, and every gradient. That is more than other projects give their rules: most of
them check only the output. A rule accepts a result only if it accepts each tensor of the result.
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
    """One tensor of a candidate's result, and the values that a rule needs to judge it."""

    found: Tensor  # float64
    expected: Tensor  # float64
    dtype: str
    textbook_error: float  # error of the textbook form in the workload's dtype
    agrees: bool  # whether attnbench's rule accepts `found`


Judge = Callable[[Question], bool]


def allclose(atol: float, rtol: float) -> Judge:
    """Build the rule abs(found - expected) <= atol + rtol * abs(expected) for every number."""

    def judge(asked: Question) -> bool:
        return torch.allclose(asked.found, asked.expected, rtol=rtol, atol=atol)

    return judge


def by_dtype(asked: Question) -> bool:
    """Return whether all numbers are close, with atol = rtol = 1e-2 in half precision and 1e-4 in other dtypes."""
    tolerance = 1e-2 if asked.dtype in HALVES else 1e-4
    return torch.allclose(asked.found, asked.expected, rtol=tolerance, atol=tolerance)


def absolute_and_relative(asked: Question) -> bool:
    """Return whether every number is off by at most 1e-2, or by at most 1 % of its expected value."""
    distance = (asked.found - asked.expected).abs()
    bad = ~(distance <= ONE_PERCENT) & ~(distance <= ONE_PERCENT * asked.expected.abs())
    return not bool(bad.any())


def twice_textbook(asked: Question) -> bool:
    """Return whether the largest error is at most twice that of the textbook form in the same dtype.

    Source: the tests of https://github.com/Dao-AILab/flash-attention.
    """
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
"""Every rule by name; two numbers in a name are the absolute and the relative tolerance."""


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
    """A reference, and the largest error of the textbook form in each of its tensors."""

    reference: Reference
    textbook_errors: dict[str, float]


def bar(reference: Reference) -> Bar:
    """Measure the errors of the textbook form, computed in the workload's dtype, against the reference."""
    workload, rows = reference.workload, reference.rows
    dtype = reference.inputs.weights.query.dtype
    rounded = reference.drawn.map(lambda tensor: tensor.to(dtype))
    made = answers(
        workload, rounded, reference.grad_rows, lambda inputs: oracle.answer(workload, inputs, rows, oracle.textbook)
    )
    errors = {name: largest(made[name], expected) for name, expected in reference.expected.items()}
    return Bar(reference=reference, textbook_errors=errors)


def verdicts(found: dict[str, Tensor], against: Bar) -> Iterator[tuple[str, bool]]:
    """Yield (name of a rule, whether the rule accepts the tensors `found`) for every rule."""
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
