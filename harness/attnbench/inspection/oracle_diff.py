"""An inspection: compute the textbook form on a sentence, and compare an implementation with it, step by step.

Each word becomes a random vector, drawn from the seed and the word, so it is the same in every sentence. No position is
added, so that a word has the same query, key and value at every position.

Only steps that are visible from outside are compared. Each step gets its inputs from the oracle, the textbook form, so
that a mistake shows in the step that makes it; only the output is computed by the whole module. The weights are read
from the context of a call whose values are unit vectors, because attention is linear in the values. Shapes are as in
contract/__init__.py, with B=1 and S=T.
"""

import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnbench import plugins
from attnbench.case import Inputs, bind, build, draw_operands, draw_weights, generator, place, reason_against
from attnbench.checking import oracle, steps
from attnbench.checking.reference import roundings
from attnbench.checking.tolerance import Tolerance, by_row
from attnbench.contract import Attention, BoundMask, Implementation, loading
from attnbench.processes.worker.attempts import describe
from attnbench.units import sanitize_line
from attnbench.workloads import sweep
from attnbench.workloads.workload import Workload

Numbers = npt.NDArray[np.float64]
PROJECTED = ("query", "key", "value")
LETTERS = {
    "x": "BTD",
    "query": "BHTK",
    "key": "BGSK",
    "value": "BGSV",
    "scores": "BHTS",
    "masked scores": "BHTS",
    "weights": "BHTS",
    "context": "BHTV",
    "output": "BTD",
}
"""The axes of each step's result, in order. B is 1, and T and S are both the number of words."""
WORD_LEN = 14  # most characters of a word in a heading
DEFAULT = "time flies like an arrow"  # the default sentence
DEFAULTS = {"num_heads": "2", "head_dim": "4", "mask": "causal"}  # default values of axes
AXES = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "embed_dim", "mask")  # axes that --set may change
MOST_WORDS, MOST_HEADS, LARGEST_WIDTH = 24, 8, 1024


def shape_of(letters: str, shape: tuple[int, ...]) -> str:
    """Format a shape with a letter for each axis: "(B=1, H=2, T=5, K=4)"."""
    return f"({', '.join(f'{letter}={size}' for letter, size in zip(letters, shape, strict=True))})"


@dataclass(frozen=True, kw_only=True)
class Walkthrough:
    """One sentence, and the results of all steps of the textbook form on it."""

    words: tuple[str, ...]
    workload: Workload
    inputs: Inputs
    steps: dict[str, Numbers]  # the result of each step of the textbook form, in float64

    @property
    def labels(self) -> list[str]:
        """The words as headings: each has at most WORD_LEN characters, without control characters."""
        return [sanitize_line(word, limit=WORD_LEN) or "?" for word in self.words]

    def sentence(self, limit: int = 0) -> str:
        """Join the words into one line of at most `limit` characters; 0: no limit."""
        return sanitize_line(" ".join(self.words), limit)

    def shape(self, name: str) -> str:
        """Return the shape of a step's result, as `shape_of` formats it."""
        return shape_of(LETTERS[name], self.steps[name].shape)


def words_of(sentence: str) -> tuple[str, ...]:
    """Split a sentence into words at white space.

    Raises:
        ValueError: the sentence has no words or too many.
    """
    words = tuple(sentence.split())
    if not words:
        raise ValueError(f'--sentence "" has no words: give at least one, as in --sentence "{DEFAULT}"')
    if len(words) > MOST_WORDS:
        raise ValueError(f"a sentence of {len(words)} words is too long to look at: give at most {MOST_WORDS}")
    return words


def workload_of(num_words: int, settings: Sequence[str], seed: int = 0) -> Workload:
    """Create the workload, of scope `module`, for a sentence of `num_words` words, with settings such as "num_heads=2".

    Raises:
        ValueError: an axis does not exist or cannot be set here, has several values, or a value is invalid or too
            large to inspect.
    """
    chosen: dict[str, str] = {}
    for axis, values in sweep.parse_settings(settings).items():
        if axis not in AXES:
            raise ValueError(f"inspect takes no --set {axis}: choose among {', '.join(AXES)}")
        if len(values) != 1:
            raise ValueError(f"--set {axis}={','.join(values)} is not allowed: inspect takes one value of an axis")
        chosen[axis] = values[0]
    usual = {axis: value for axis, value in DEFAULTS.items() if axis != "head_dim" or "embed_dim" not in chosen}
    fixed = {"seq_len": num_words, "scope": "module", "direction": "inference", "seed": seed}
    point = sweep.make(usual | chosen | fixed)
    if point.num_heads > MOST_HEADS or max(point.head_dim, point.value_dim, point.embed_dim) > LARGEST_WIDTH:
        limits = f"at most {MOST_HEADS} heads and widths of at most {LARGEST_WIDTH}"
        raise ValueError(f"these sizes are too large to look at: choose {limits}")
    return point


def inputs_of(words: Sequence[str], point: Workload) -> Inputs:
    """Draw x (B=1, T, D), the mask's operands and the weights: float64 tensors whose values are exact in float32, too.

    Each word becomes a vector of standard normal numbers, which depends only on the seed and the word.
    """
    rows = []
    for word in words:
        digest = int.from_bytes(hashlib.sha256(word.encode(errors="surrogateescape")).digest()[:6], "big")
        draws = generator(point.seed, 4, digest)
        rows.append(torch.randn(point.embed_dim, generator=draws, dtype=torch.float64))
    tensors = {"x": torch.stack(rows)[None]} | draw_operands(point, generator(point.seed, 5))
    return Inputs(tensors=tensors, weights=draw_weights(point)).map(lambda tensor: tensor.float().double())


def walk_through(words: tuple[str, ...], point: Workload) -> Walkthrough:
    """Compute every step of the textbook form on one sentence, in float64."""
    drawn = inputs_of(words, point)
    x = drawn.tensors["x"]
    results = steps.walked(point, drawn, torch.arange(point.seq_len)) | {"x": x}
    results |= zip(PROJECTED, oracle.project(x, x, drawn.weights), strict=True)
    numbers = {name: results[name].numpy() for name in LETTERS}
    return Walkthrough(words=words, workload=point, inputs=drawn, steps=numbers)


class _Trouble(str):
    """The reason for a missing result, in words."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of one step by an implementation and by the oracle, with the axes in LETTERS."""

    name: str  # a key of LETTERS
    oracle: Numbers
    tolerance: float  # limit of `largest`
    actual: Numbers | None = None  # None: nothing to compare
    largest: float = math.inf  # difference at `place` or, if only the RMS error exceeds its limit, the RMS error
    place: tuple[int, ...] | None = None  # index of the difference that is largest relative to its limit
    agrees: bool = False
    trouble: str = ""  # why there is nothing to compare; "" if the results were compared

    @property
    def step(self) -> str:
        """The step that computes the result: `projection` for query, key and value; otherwise `name`."""
        return "projection" if self.name in PROJECTED else self.name

    def where(self, words: tuple[str, ...]) -> str:
        """Describe `place` in words, such as "head 1, query 'flies', key 'time'"; return "" if it is None."""
        if self.place is None:
            return ""
        letters = LETTERS[self.name]
        shape = dict(zip(letters, self.oracle.shape, strict=True))
        at = dict(zip(letters, self.place, strict=True))
        parts = [f"{name} {at[letter]}" for letter, name in (("H", "head"), ("G", "key/value head")) if letter in at]
        names = {"T": "query" if self.step in {"weights", "context"} else "word"}
        names["S"] = "key" if letters.endswith("S") else "word"
        for letter in (each for each in names if each in at):
            word = words[at[letter]]
            number = "" if words.count(word) == 1 else f" (word {at[letter] + 1})"
            parts.append(f"{names[letter]} '{sanitize_line(word, limit=WORD_LEN)}'{number}")
        parts += [f"column {at[letter]}" for letter in "KVD" if letter in at and shape[letter] > 1]
        return ", ".join(parts)

    def values_there(self) -> tuple[float, float] | None:
        """Return the implementation's and the oracle's value at `place`; None if there is nothing to compare."""
        if self.actual is None or self.place is None:
            return None
        return float(self.actual[self.place]), float(self.oracle[self.place])


def compared(tolerance: Tolerance, result: object) -> Comparison:
    """Compare `result`, an object of any type from foreign code, with the oracle's result, `tolerance.expected`."""
    right, letters = tolerance.expected, LETTERS[tolerance.name]
    blank = Comparison(name=tolerance.name, oracle=right.numpy(), tolerance=tolerance.largest)
    if isinstance(result, _Trouble):
        return replace(blank, trouble=sanitize_line(result))
    expected = f"it should be {shape_of(letters, right.shape)}"
    if not isinstance(result, Tensor):
        return replace(blank, trouble=f"it gave a {type(result).__name__}, not a tensor; {expected}")
    if result.shape != right.shape or not result.is_floating_point():
        shape = tuple(result.shape)
        text = shape_of(letters, shape) if len(shape) == len(letters) else str(shape)
        dtype = "" if result.is_floating_point() else f" of {str(result.dtype).removeprefix('torch.')}"
        return replace(blank, trouble=f"its shape is {text}{dtype}; {expected}")
    judged = tolerance.judge(result)
    error, limit = judged.decisive
    return replace(
        blank,
        tolerance=limit,
        actual=result.detach().double().cpu().numpy(),
        largest=math.inf if error is None else error,
        place=judged.worst,
        agrees=judged.agrees,
    )


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The comparison of an implementation with the oracle, step by step, on the words of one sentence."""

    spec: str = ""  # as the user entered it
    walk: Walkthrough
    comparisons: tuple[Comparison, ...] = ()
    unseen: str = ""  # why some steps are not visible, or why the workload is unsupported; "" if neither holds

    @property
    def implementation(self) -> str:
        """The implementation's name."""
        return plugins.name_of(self.spec)

    @property
    def first(self) -> Comparison | None:
        """The comparison of the first step that differs; None if all agree."""
        return next((each for each in self.comparisons if not each.agrees), None)


def inspect_implementation(name: str, sentence: str = DEFAULT, settings: Sequence[str] = ()) -> Inspection:
    """Inspect the implementation `name` (or path/to/file.py:Name) on a sentence.

    Raises:
        ValueError: the implementation does not exist, the sentence has no words or too many, or a setting is invalid.
    """
    plugins.check_specs([name])
    words = words_of(sentence)
    walk = walk_through(words, workload_of(len(words), settings))
    implementation = _try(lambda: loading.implementation(name), "it cannot be loaded:", ValueError)
    return replace(compare(implementation, walk), spec=name)


def compare(implementation: Implementation | str, walk: Walkthrough) -> Inspection:
    """Compare an implementation with the oracle; if `implementation` is a str, it is the reason why loading failed."""
    workload, inputs = walk.workload, walk.inputs
    limits, rows, narrow = limits_of(workload, inputs), torch.arange(workload.seq_len), inputs.map(torch.Tensor.float)
    honest = [oracle.answer(workload, narrow, rows, form) for form in oracle.YARDSTICKS]  # (B, T, D) each
    right = limits("output", oracle.answer(workload, inputs, rows), *honest)
    if isinstance(implementation, str):
        return Inspection(walk=walk, comparisons=(compared(right, implementation),))
    if reason := reason_against(implementation, workload):
        unmasked = sweep.make(workload.axes() | {"mask": "none"})
        advice = "" if reason_against(implementation, unmasked) else "; try --set mask=none"
        return Inspection(walk=walk, unseen=sanitize_line(f"this workload is unsupported: {reason}{advice}"))
    mask, placed = bind(workload), place(inputs, workload)
    module = _try(lambda: build(workload, implementation, placed, mask).module, "it cannot be built:")
    if isinstance(module, _Trouble):
        return Inspection(walk=walk, comparisons=(compared(right, module),))
    x, kind = placed.tensors["x"], type(module)
    mask.inputs = {name: tensor for name, tensor in placed.tensors.items() if name in workload.operands}
    output = compared(right, _try(lambda: module(x.clone(), None, mask=mask)))
    comparisons: list[Comparison] = []
    unseen = []
    has_project = isinstance(module, Attention) and Attention.project is not kind.project
    if not has_project and kind.forward is not Attention.forward:
        unseen.append(f"its projections cannot be seen: {kind.__name__} has a forward of its own, and no project")
    else:  # a module with the right output may compute this step in another way
        projections = _projections(module, limits, inputs, x)
        comparisons += [each for each in projections if each.agrees or not output.agrees]
    reason = reason_against(implementation, sweep.make(workload.axes() | {"scope": "attention"}))
    if reason is None and not hasattr(module, "attend"):
        reason = f"{kind.__name__} has no attend"
    if reason:
        unseen.append(f"its steps from scores to context cannot be seen: {reason}")
    else:
        comparisons += _weights_and_context(module, walk, limits, mask)
    return Inspection(walk=walk, comparisons=(*comparisons, output), unseen=sanitize_line("; ".join(unseen)))


Limits = Callable[..., Tolerance]
"""A function of a step's name, the right result, and the float32 results of textbook forms; it returns a tolerance."""


def limits_of(workload: Workload, inputs: Inputs) -> Limits:
    """Return a function that computes the tolerance of a step on these inputs, as a check in float32 would."""
    bound = oracle.score_bound(workload, inputs, torch.arange(workload.seq_len))
    num_roundings = roundings(workload, "output", bound)

    def limit(name: str, right: Tensor, *honest: Tensor) -> Tolerance:
        errors = [by_row(each.double() - right, -2) for each in honest]
        return Tolerance(name, right, errors, axis=-2, dtype=torch.float32, num_roundings=num_roundings)

    return limit


def _projections(module: Attention, limits: Limits, inputs: Inputs, x: Tensor) -> list[Comparison]:
    results = _try(lambda: module.project(x.clone(), x.clone()))
    if not (isinstance(results, tuple | list) and len(results) == len(PROJECTED)):
        trouble = results if isinstance(results, _Trouble) else _Trouble("project must give query, key and value")
        results = [trouble] * len(PROJECTED)
    right = oracle.project(inputs.tensors["x"], inputs.tensors["x"], inputs.weights)
    honest = oracle.project(x, x, inputs.weights.map(torch.Tensor.float))
    return list(map(compared, map(limits, PROJECTED, right, honest), results))


def _weights_and_context(module: Any, walk: Walkthrough, limits: Limits, mask: BoundMask) -> list[Comparison]:  # noqa: ANN401
    """Compare the weights and the context that the module computes from the oracle's query, key and value."""
    inputs, x = walk.inputs, walk.inputs.tensors["x"]
    query, key, value = (tensor.float() for tensor in oracle.project(x, x, inputs.weights))
    rows = oracle.row_mask(walk.workload, torch.arange(walk.workload.seq_len), inputs=inputs.tensors)
    mask.inputs = {name: tensor.float() for name, tensor in rows.inputs.items()}
    narrow = replace(rows, inputs=mask.inputs)

    def actual(values: Tensor) -> Any:  # noqa: ANN401 - any result
        return module.attend(query.clone(), key.clone(), values.clone(), mask)

    right = oracle.attend(query.double(), key.double(), value.double(), rows)
    honest = [form(query, key, value, narrow) for form in oracle.YARDSTICKS]
    context = compared(limits("context", right, *honest), _try(lambda: actual(value)))
    if context.trouble:  # the weights need a context
        return [context]

    def weights_of(form: oracle.Form, query: Tensor, key: Tensor, mask: oracle.RowMask) -> Tensor:
        return oracle.weights(lambda unit: form(query, key, unit, mask), value.to(query))

    right = weights_of(oracle.attend, query.double(), key.double(), rows)
    honest = [weights_of(form, query, key, narrow) for form in oracle.YARDSTICKS]
    weights = _try(lambda: oracle.weights(actual, value))
    return [compared(limits("weights", right, *honest), weights), context]


def _try(call: Callable[[], Any], what: str = "it raised", *passing: type[Exception]) -> Any:  # noqa: ANN401
    """Return the result of `call` or, if it raises an exception, a _Trouble: `what`, followed by the error in words.

    Exceptions of the types in `passing` propagate. The call records no autograd graph, and prints to stderr.
    """
    try:
        with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
            return call()
    except passing:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything
        return _Trouble(f"{what} {describe(error)[1]}")
