"""Test which rules (judges.py) detect each known mistake, on each kind of input, in each dtype, at many lengths."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache

import msgspec
import torch

from attnbench.case import Inputs
from attnbench.checking.mistakes import catalogue
from attnbench.checking.probes import PROBES, VacuousError
from attnbench.checking.reference import Reference, answers, largest
from attnbench.checking.steps import Mistake
from attnbench.workloads.workload import Workload
from studies.detection.judges import OURS, Bar, bar, draw_uniform, verdicts
from studies.frame import Row

INPUTS: dict[str, Callable[[Workload, int], Inputs]] = {"uniform": draw_uniform, **PROBES}
"""Kinds of input by name: uniform numbers, as many benchmarks draw them, and the inputs of our check (probes)."""
EVERYTHING = "all"
DIFFERS = 1e-6
"""A mistake makes no difference if its error in float64 is at most this share of each tensor's largest value."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of one rule on one mistake with one kind of input; `inputs` is "all" for the whole check."""

    mistake: str
    form: str  # description of this form of the mistake; a name may have several
    step: str
    dtype: str
    length: int
    workload: str
    inputs: str
    rule: str
    is_caught: bool


class Absent(msgspec.Struct, frozen=True, kw_only=True):
    """A mistake that cannot be made, or makes no difference, at any workload of this dtype and length."""

    mistake: str
    dtype: str
    length: int


@dataclass(frozen=True)
class Sizes:
    """A family of workloads. `axes` has the values that differ from the default: two heads of width 16, no mask.

    The value of an axis may be a function of the length.
    """

    axes: dict[str, object]

    def at(self, length: int, dtype: str) -> Workload:
        """Build the workload of this family with a length and a dtype."""
        sizes = {"seq_len": length, "num_heads": 2, "head_dim": 16, "dtype": dtype, "direction": "inference"}
        given = {name: axis(length) if callable(axis) else axis for name, axis in self.axes.items()}
        return Workload(**(sizes | given))  # type: ignore[arg-type]


def _longer(length: int) -> int:
    return length + max(1, length // 8)


def _odd(length: int) -> int:
    return length - 1 if length > 4 else length + 1  # noqa: PLR2004 - so short that a tile of two is half of it


def _window(length: int) -> str:
    return f"sliding_window({max(1, length // 4)})"


def _much_longer(length: int) -> int:
    return 2 * length + 3


def _part(length: int) -> int:
    return max(2, length // 4)


def _sides(length: int) -> str:
    return f"window({max(1, length // 8)},{max(1, length // 4)})"


FAMILIES = (
    Sizes({}),
    Sizes({"mask": "causal"}),
    Sizes({"mask": "padding", "batch_size": 2}),
    Sizes({"mask": _window}),
    Sizes({"mask": "causal", "kv_len": _longer}),
    Sizes({"mask": "causal_bottom_right", "kv_len": _longer}),
    Sizes({"kv_len": _odd}),
    Sizes({"batch_size": 2}),
    Sizes({"batch_size": 2, "mask": "padding_to_nothing"}),
    Sizes({"num_heads": 4, "num_kv_heads": 2}),
    Sizes({"scope": "module"}),
    Sizes({"scope": "module", "mask": "causal"}),
    Sizes({"mask": "causal+padding", "batch_size": 2}),
    Sizes({"mask": "additive", "num_heads": 3}),
    Sizes({"mask": "alibi", "num_heads": 3, "kv_len": _odd}),
    Sizes({"mask": "alibi_bottom_right", "num_heads": 8, "kv_len": _odd}),
    Sizes({"mask": "causal+softcap(2)+additive"}),
    Sizes({"sinks": "learned", "mask": "causal"}),
    Sizes({"scale": 0.1, "mask": "causal"}),
    Sizes({"mask": "relative_buckets(8,20)", "num_heads": 4, "scale": 1.0}),
    Sizes({"mask": "causal+relative_buckets_past(8,20)", "num_heads": 3, "kv_len": _longer}),
    Sizes({"mask": _sides}),
    Sizes({"mask": lambda length: f"causal+chunks({_part(length)})"}),
    Sizes({"mask": lambda length: f"causal_bottom_right+chunks_bottom_right({_part(length)})", "kv_len": _longer}),
    Sizes({"mask": "ragged", "batch_size": 2, "kv_len": _longer}),
    Sizes({"mask": "ragged", "batch_size": 3, "kv_len": _much_longer}),
)
"""Families in order. A form of a mistake is tried only on the first one where it can be made and makes a difference."""


MOST_FORMS_LEN = 32
"""Largest length at which every form of a mistake is tried; at longer ones, only the middle one of the forms."""
USUAL_LEN = 17


@cache
def forms(family: int, length: int, dtype: str) -> dict[str, list[Mistake]]:
    """Group by name the catalogue's mistakes for FAMILIES[family] at this length and dtype."""
    found: dict[str, list[Mistake]] = {}
    for mistake in catalogue(FAMILIES[family].at(length, dtype)):
        found.setdefault(mistake.name, []).append(mistake)
    return found


@cache
def kinds() -> dict[str, Mistake]:
    """Return one mistake of each name, by name: the first one that FAMILIES allow at length USUAL_LEN."""
    every = [forms(number, USUAL_LEN, "float32") for number in range(len(FAMILIES))]
    first: dict[str, Mistake] = {}
    for family in every:
        for name, mistakes in family.items():
            first.setdefault(name, mistakes[0])
    return first


def _differs(planted: Mistake, workload: Workload) -> bool:
    """Return whether the mistake changes the answer in float64 on at least one of three kinds of input."""
    for probe in ("normal", "needles", "large"):
        against = _bar(probe, workload)
        if against is not None:
            made = _made(planted, against, torch.float64)
            for name, expected in against.reference.expected.items():
                off = largest(made[name], expected)
                if not off <= DIFFERS * float(expected.abs().max()):
                    return True
    return False


@cache
def _bar(inputs: str, workload: Workload) -> Bar | None:
    """Compute the reference for one kind of input; return None if no mistake could show with it (VacuousError)."""
    try:
        reference = Reference(workload, INPUTS[inputs](workload, 0), 0)
        _ = reference.tolerances
        return bar(reference)
    except VacuousError:
        return None


def _made(planted: Mistake, against: Bar, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    reference = against.reference
    inputs = reference.drawn.map(lambda tensor: tensor.to(dtype))
    ask = planted.answer(reference.workload, reference.rows)
    return answers(reference.workload, inputs, reference.grad_rows.to(dtype), ask)


def rows(length: int, dtype: str, names: Collection[str], _: int = 0) -> list[Row]:
    """Try the mistakes `names` (all if empty) at one length in one dtype; return each Cell and Absent as a row."""
    torch.set_num_threads(1)  # most tensors are small: a second thread would mostly wait
    return [msgspec.to_builtins(cell) for cell in cells(length, dtype, names)]


def cells(length: int, dtype: str, names: Collection[str] = ()) -> Iterator[Cell | Absent]:
    """Try the mistakes `names` (all if empty); yield a Cell for each form, rule and kind of input, or one Absent."""
    for name, kind in kinds().items():
        if not names or name in names:
            yield from _tried(kind, length, dtype)
    _bar.cache_clear()
    forms.cache_clear()


def _tried(kind: Mistake, length: int, dtype: str) -> Iterator[Cell | Absent]:
    """Try the forms of one mistake, each on the first family where it can be made and makes a difference."""
    tried = set[str]()
    for number, family in enumerate(FAMILIES):
        every = forms(number, length, dtype).get(kind.name, [])
        for planted in every if length <= MOST_FORMS_LEN else every[len(every) // 2 :][:1]:
            is_new = planted.words not in tried and not (tried and length > MOST_FORMS_LEN)
            if is_new and _differs(planted, family.at(length, "float64")):
                tried.add(planted.words)
                yield from _judged(planted, family.at(length, dtype))
    if not tried:
        yield Absent(mistake=kind.name, dtype=dtype, length=length)


def _judged(planted: Mistake, workload: Workload) -> Iterator[Cell]:
    def cell(inputs: str, rule: str, *, is_caught: bool) -> Cell:
        return Cell(
            mistake=planted.name,
            form=planted.words,
            step=planted.step,
            dtype=workload.dtype,
            length=workload.seq_len,
            workload=workload.id,
            inputs=inputs,
            rule=rule,
            is_caught=is_caught,
        )

    caught = False
    for inputs in INPUTS:
        against = _bar(inputs, workload)
        if against is None:
            continue
        made = _made(planted, against, against.reference.inputs.weights.query.dtype)
        for rule, is_right in verdicts(made, against):
            yield cell(inputs, rule, is_caught=not is_right)
            caught |= rule == OURS and inputs in PROBES and not is_right
    yield cell(EVERYTHING, OURS, is_caught=caught)
