"""The right answer to each probe (kind of inputs), its tolerance, and the error of a candidate.

A candidate is the implementation under test. Tolerances follow from the errors of yardsticks: plain textbook forms in
the workload's dtype (tolerance.py). Source: the tests of https://github.com/Dao-AILab/flash-attention, which allow
twice the error of such a form. Shapes as in the contract; R is the number of compared query rows.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice

import msgspec
import torch
from torch import Tensor

from attnbench.case import (
    QKV,
    TORCH_DTYPES,
    Inputs,
    copied,
    generator,
    laid_out,
    output_shape,
    place,
)
from attnbench.checking import oracle
from attnbench.checking.calls import Caller, call_on, caller_of
from attnbench.checking.mistakes import FINITE, NAN
from attnbench.checking.probes import IN_TURN, NEAR, PROBES, TOKENS, VacuousError, draw_near, forget_drawn
from attnbench.checking.steps import Mistake
from attnbench.checking.tolerance import RowErrors, Tolerance, by_row
from attnbench.contract import Implementation
from attnbench.devices import device
from attnbench.storage.records import TensorError
from attnbench.workloads.workload import MATMUL_PRECISIONS, Workload

SCREENED = "needles"
"""The probe (kind of inputs) on which every row of a long output is screened, that is, compared with a plain textbook
evaluation. On this probe no row of the output is a mean of many values, so none is near 0."""
NUM_SUSPECTS = 8
"""Extra query rows that the oracle checks: those where the output is furthest from a plain textbook evaluation."""
FEW, MOVED_IF_FEW = 64, 8
"""Yardsticks (correct textbook forms) are computed on the inputs, and on copies of these changed by a rounding. With at
most FEW scores, yardsticks may be exact by luck, so there are MOVED_IF_FEW copies. In inference in half precision,
where two nearly equal scores may change places, there are two copies; otherwise there is one."""
LENIENCY_OF_LARGE = 4.0
"""Factor of the limits at large scores: a weight near a tie depends on a score's last bit, so errors vary more."""
QUICK_SHARE = 0.5
"""If an error is at most this share of the limit for roundings alone, `Reference.judge` computes no yardsticks."""
BY_QUERY = ("output", "gradient of query")  # their rows are queries
SUMS_IN_HALF = 2.0
"""Number of roundings allowed in a gradient if kernels sum it in half precision over a few blocks of queries."""
PER_ROOT = 1.5
"""Number of roundings allowed in a sum of n terms, divided by sqrt(n): kernels add the terms in different orders."""
PER_ROOT_IN_HALF = 0.6
"""Number of roundings allowed in gradients of key and value in half precision, divided by sqrt(T): autograd turns a
loop over queries into sums of T terms."""
OVER_QUERIES = ("gradient of key", "gradient of value")  # sums over queries
OF_SCORES = ("gradient of query", "gradient of key")
"""At large scores these gradients are 0 except for roundings of terms that are thousands of times larger. Half
precision cannot resolve them, so the check only requires that they are finite."""
SUMMED = "gradient of value"
"""The gradient whose tolerance may depend on the size of intermediate sums over heads: see `group_sum`."""

NEARER = 0.25
"""An answer to queries that see no key follows an accepted convention, such as the mean of all values, only if its
distance from the convention's answer is less than this share of its distance from 0."""
EMPTY_YARDSTICKS, EMPTY_ROUNDINGS = 2.5, 4.0
"""Allowed difference between an answer to queries that see no key and a convention's answer, beyond the tolerance:
EMPTY_YARDSTICKS times the rounding error of the convention's answer in the dtype, plus EMPTY_ROUNDINGS roundings."""


class UncheckableError(Exception):
    """A gradient that is to be timed cannot be checked; the message names the gradient."""


def _require_informative(output: Tensor) -> None:
    """Raise ValueError if a reference output is not finite, and VacuousError if it is constant."""
    numbers = output.cpu().flatten()
    if not numbers.isfinite().all():
        raise ValueError("the reference output is not finite: nothing can be compared with it")
    if (numbers == numbers[0]).all():
        raise VacuousError("the reference output is constant: nothing can be compared with it")


class Reference:
    """The oracle's answer to one kind of input: for each tensor, by name, the right value and the tolerance."""

    def __init__(  # noqa: PLR0913 - everything that its answers depend on
        self,
        workload: Workload,
        drawn: Inputs,
        seed: int,
        *,
        probe: str = "",
        rows: Tensor | None = None,
        grad_rows: Tensor | None = None,
        mask: Callable[[oracle.RowMask], oracle.RowMask] = lambda mask: mask,
        has_gradients: bool = True,
        on_step: Callable[[], object] = lambda: None,
    ) -> None:
        """Evaluate the oracle at some query rows and, in half precision, the textbook forms for the tolerances.

        In other dtypes, textbook forms are evaluated when a tolerance is needed. All run on the workload's device, or
        on the CPU if the device has no float64 (docs/adr/0035). `rows` (R,) are the compared rows of the output and of
        the query's gradient, by default those of `oracle.checked_rows`. `grad_rows`, (B, H, R, V) or in scope `module`
        (B, R, D), is the output's gradient at these rows, by default random. `mask` changes the workload's mask.
        Gradients are compared if the direction has them and `has_gradients` is True. Some probes (kinds of inputs)
        compare fewer gradients, or have wider limits. `on_step` is called before each part.

        Raises:
            ValueError: the reference output is not finite.
            VacuousError: the reference output is constant or, in half precision, a textbook form overflows.
        """
        dtype = TORCH_DTYPES[workload.dtype]
        drawn = laid_out(drawn, workload).map(torch.Tensor.contiguous)  # heads share no memory
        draws = generator(workload.seed, 4, seed)
        self.workload, self.seed, self.on_step = workload, seed, on_step
        self.has_gradients = has_gradients and probe != "huge"
        self._at = partial(Reference, workload, drawn, seed, probe=probe, on_step=on_step)  # takes other `rows`
        compared = workload if self.has_gradients else msgspec.structs.replace(workload, direction="inference")
        self._rounded = drawn.map(lambda tensor: tensor.to(dtype))  # on the CPU
        chosen = oracle.checked_rows(workload, draws)
        self.rows = chosen if rows is None else rows  # (R,) the query rows that are compared
        self.is_screened = probe == SCREENED and len(self.rows) < workload.seq_len
        *batch, _, width = output_shape(workload)
        drawn_rows = torch.randn(*batch, len(self.rows), width, generator=draws, dtype=torch.float64)
        self.grad_rows = (drawn_rows if grad_rows is None else grad_rows.cpu()).to(dtype)  # of the output at the rows
        exact = self._exact_inputs()
        self._compared, self._draws, self._mask = compared, draws, mask
        answer = self._answers_by(oracle.attend, exact)
        _require_informative(answer["output"])
        self._sizes = self._scales(answer)
        left_out = OF_SCORES if probe == "large" and is_half(workload) else ()
        expected = {name: each for name, each in answer.items() if self._sizes[name] > 0 and name not in left_out}
        self.expected = {name: tensor.cpu() for name, tensor in expected.items()}
        self._leniency = LENIENCY_OF_LARGE if probe in {"large", "huge"} else 1.0
        self._score_bound = oracle.score_bound(workload, exact, self.rows)
        # In half precision few errors are below QUICK_SHARE, and yardsticks show early that correct code overflows.
        self.least = self.tolerances if is_half(workload) else {name: self._tolerance_of(name) for name in expected}

    def _scales(self, answer: dict[str, Tensor]) -> dict[str, float]:
        """Return the scale of each tensor of an answer, by name (see `scales_of`).

        A scale of SUMMED above 0 is raised to the size of its intermediate sums (see `group_sum`).
        """
        scales = scales_of(answer)
        if scales.get(SUMMED, 0.0) > 0:
            scales[SUMMED] = max(scales[SUMMED], group_sum(self.workload, self.grad_rows))
        return scales

    @cached_property
    def tolerances(self) -> dict[str, Tolerance]:
        """The tolerance of each tensor by name.

        Raises:
            VacuousError: a textbook form overflows, so even the errors of correct code are not finite.
        """
        exact = self._exact_inputs()
        yardsticks = self._yardsticks(exact)
        is_summed = self._compared.direction != "inference" and not is_half(self.workload)  # half sums in float32
        sums = oracle.SCATTERED if is_summed else ()
        terms = _sizes_of_terms([self._answers_by(form, exact.map(torch.Tensor.float)) for form in sums])
        found = {name: self._tolerance_of(name, yardsticks[name], terms.get(name)) for name in self.expected}
        if not all(each.is_finite for each in found.values()):
            raise VacuousError(f"correct code overflows {self.workload.dtype} here: nothing can be compared")
        return found

    def judge(self, name: str, candidate: Tensor) -> TensorError:
        """Compare a candidate's tensor with the right one.

        The tolerance is never smaller than the limit for roundings alone. Textbook forms take long to compute, so they
        are computed only if an error exceeds QUICK_SHARE times that limit.

        Raises:
            VacuousError: see `tolerances`.
        """
        found = self.least[name].judge(candidate)
        is_small = found.ratio is not None and found.ratio <= QUICK_SHARE
        return found if is_small else self.tolerances[name].judge(candidate)

    def limits(self, name: str) -> Iterator[float]:
        """Yield two limits of a tensor's largest error: one for roundings alone, which is fast, then the tolerance.

        Raises:
            VacuousError: see `tolerances`.
        """
        yield self.least[name].largest
        yield self.tolerance(name)

    def _tolerance_of(
        self, name: str, yardsticks: Sequence[RowErrors] = (), terms: RowErrors | None = None
    ) -> Tolerance:
        return Tolerance(
            name,
            self.expected[name],
            yardsticks,
            axis=row_axis(name),
            dtype=TORCH_DTYPES[self.workload.dtype],
            num_roundings=roundings(self.workload, name, self._score_bound),
            scale=self._sizes[name],
            leniency=self._leniency,
            labels=self.rows if name in BY_QUERY else None,
            terms=terms,
        )

    def _answers_by(self, form: oracle.Form, inputs: Inputs) -> dict[str, Tensor]:
        """Compute a form's output at the rows, and its gradients, on the device and in the dtype of `inputs`."""
        any_tensor = inputs.weights.query
        grads = self.grad_rows.to(device=any_tensor.device, dtype=any_tensor.dtype)

        def forward(at: Inputs) -> Tensor:
            return oracle.answer(self.workload, at, self.rows, form, self.on_step, self._mask)

        return answers(self._compared, inputs, grads, forward)

    def _exact_inputs(self) -> Inputs:
        """Return the rounded inputs at the compared rows in float64, on the device or, if it lacks float64, the CPU."""
        target = device(self.workload.device)
        where = target.torch_device if target.has_float64 else "cpu"
        reduced = oracle.at_rows(self.workload, self._rounded, self.rows)
        return reduced.map(lambda tensor: tensor.to(where).double())

    def _yardsticks(self, exact: Inputs) -> dict[str, list[RowErrors]]:
        """Return errors of textbook forms in the workload's dtype, by tensor, on the inputs and on changed copies."""
        workload, dtype, target = self.workload, TORCH_DTYPES[self.workload.dtype], device(self.workload.device)
        has_own_products = workload.float32_matmul_precision != MATMUL_PRECISIONS[0]  # TF32 exists only on the device
        where = target.torch_device if target.has_float64 or has_own_products else "cpu"

        def moved(tensor: Tensor) -> Tensor:
            share = torch.rand(tensor.shape, generator=self._draws, dtype=tensor.dtype).to(tensor.device) * 2 - 1
            return (tensor * (1 + torch.finfo(dtype).eps * share)).to(device=where, dtype=dtype)

        yardsticks: dict[str, list[RowErrors]] = {name: [] for name in self.expected}
        unmoved = exact.map(lambda tensor: tensor.to(device=where, dtype=dtype))
        is_cheap = is_half(workload) and workload.direction == "inference"
        num_moved = MOVED_IF_FEW if workload.num_scores <= FEW else 1 + is_cheap
        for inputs in (unmoved, *(exact.map(moved) for _ in range(num_moved))):
            for form in oracle.YARDSTICKS if inputs is unmoved else oracle.OF_MOVED:
                honest = self._answers_by(form, inputs)
                for name, right in self.expected.items():
                    yardsticks[name].append(by_row(honest[name].to(right) - right, row_axis(name)))
        return yardsticks

    @cached_property
    def inputs(self) -> Inputs:
        """The candidate's inputs: on the device, in the workload's dtype and layout."""
        return place(self._rounded, self.workload)

    @cached_property
    def grad_output(self) -> Tensor | None:
        """The output's gradient on the device, 0 outside the compared rows; None if no gradients are compared."""
        if not self.has_gradients or self.workload.direction == "inference":
            return None
        full = torch.zeros(output_shape(self.workload), dtype=self.grad_rows.dtype)
        at_rows = full.index_copy(full.dim() - 2, self.rows, self.grad_rows)
        return at_rows.to(device(self.workload.device).torch_device)

    def release(self) -> None:
        """Free the inputs on a device other than the host, where the inputs of all probes might not fit at once."""
        if not device(self.workload.device).is_host:
            for name in ("inputs", "grad_output"):
                self.__dict__.pop(name, None)

    @cached_property
    def drawn(self) -> Inputs:
        """The inputs that the candidate gets: rounded to the workload's dtype, then stored in float64 on the CPU."""
        return self._rounded.map(torch.Tensor.double)

    def answers_of(
        self,
        form: Mistake,
        dtype: torch.dtype = torch.float64,
        *,
        rows: Tensor | None = None,
        has_gradients: bool = True,
    ) -> dict[str, Tensor]:
        """Compute a mistake's output at `rows` and its gradients, by name, in `dtype`; return them in float64."""
        compared = self.workload if has_gradients else msgspec.structs.replace(self.workload, direction="inference")
        ask = form.answer(self.workload, self.rows if rows is None else rows)
        inputs = self.drawn.map(lambda tensor: tensor.to(dtype))
        found = self.at_rows(answers(compared, inputs, self.grad_rows.to(dtype), ask))
        return {name: tensor.double() for name, tensor in found.items()}

    def tolerance(self, name: str) -> float:
        """Return the largest error that a tensor may have anywhere."""
        return self.tolerances[name].largest

    @cached_property
    def _next_row(self) -> Tensor:
        """For each query (T,), the index in `rows` of the first compared row at or after it, else of the last one."""
        later = torch.searchsorted(self.rows, torch.arange(self.workload.seq_len))
        return later.clamp(max=len(self.rows) - 1)

    def observe(self, output: Tensor) -> "Observation":
        """Detach an output (..., T, width), and select its compared rows."""
        output = output.detach()
        return Observation(output, {"output": output.index_select(-2, self.rows.to(output.device))})

    def at_rows(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Reduce the query's gradient to the compared rows; return all gradients by name.

        The other rows must be 0. Each of them is added to a compared row, where its error shows.
        """
        query = gradients.get("gradient of query")
        if query is None or query.shape[-2] == len(self.rows):
            return gradients
        reduced = query.new_zeros(*query.shape[:-2], len(self.rows), query.shape[-1])
        return gradients | {"gradient of query": reduced.index_add(-2, self._next_row.to(query.device), query)}

    @cached_property
    def screen(self) -> Tensor | None:
        """A cheap second answer for all rows: the textbook output in float32 or wider; None where it is not needed.

        At long lengths the oracle computes only some rows; it then also checks the rows where an output is furthest
        from this tensor. Computed only for the inputs named SCREENED, and for at most MOST_PAIRS scores.
        """
        workload = self.workload
        if not self.is_screened or workload.num_scores > oracle.MOST_PAIRS:
            return None
        dtype = torch.promote_types(TORCH_DTYPES[workload.dtype], torch.float32)
        inputs = self.drawn.map(lambda tensor: tensor.to(device(workload.device).torch_device, dtype))
        with torch.no_grad():
            return oracle.answer(workload, inputs, torch.arange(workload.seq_len), oracle.textbook, self.on_step)

    def at_suspects(self, output: Tensor) -> "Reference | None":
        """Return a reference at the NUM_SUSPECTS rows where `output` is furthest from `screen`; None without `screen`.

        The distance of a row is divided by the limit in `least` of the next compared row.
        """
        if self.screen is None:
            return None
        apart = (output.detach().to(self.screen) - self.screen).abs()
        apart = apart.where(apart.isfinite(), torch.inf).transpose(-2, -1).flatten(end_dim=-2).amax(dim=0).cpu()  # (T,)
        apart = apart / self.least["output"].of_rows[self._next_row]
        apart[self.rows] = -1.0  # these are compared already
        return self._at(rows=apart.topk(min(NUM_SUSPECTS, len(apart))).indices.sort().values, has_gradients=False)


KEPT: dict[tuple[Workload, str, int], Reference | VacuousError] | None = None
"""Results of `reference_for_probe`, including VacuousError, by workload, probe and seed; None: nothing is kept."""


def keep_references() -> None:
    """Make this process keep the reference of each probe, for later checks of the same workloads.

    Only references of small workloads are kept: those for which the oracle computes every row.
    """
    global KEPT  # noqa: PLW0603 - one for the whole process, as its memory is
    KEPT = {} if KEPT is None else KEPT


def reference_for_probe(
    workload: Workload, probe: str, seed: int, on_step: Callable[[], object] = lambda: None
) -> Reference:
    """Return the reference for the inputs of `probe`: a name in PROBES, or NEAR for the inputs of `draw_near`.

    Raises:
        ValueError: the reference output is not finite.
        VacuousError: the probe cannot expose any mistake at this workload.
    """
    if KEPT is None or workload.num_scores > oracle.FULL_CHECK_PAIRS:
        return _reference_for_probe(workload, probe, seed, on_step)
    key = workload, probe, seed
    if key not in KEPT:
        try:
            KEPT[key] = _reference_for_probe(workload, probe, seed, on_step)
        except VacuousError as error:
            KEPT[key] = error
    if isinstance(found := KEPT[key], VacuousError):
        raise found
    return found


def _reference_for_probe(workload: Workload, probe: str, seed: int, on_step: Callable[[], object]) -> Reference:
    drawn = (PROBES | {NEAR: draw_near})[probe](workload, seed)
    if workload.rotary != "none" and workload.scope == "attention":  # a probe defines the rotated operands
        query, key, value = (drawn.tensors[name] for name in QKV)
        turned = oracle.in_place(workload, torch.arange(workload.seq_len), (query, key, value), -1)
        drawn = replace(drawn, tensors=drawn.tensors | dict(zip(QKV, turned, strict=True)))
    return Reference(workload, drawn, seed, probe=probe, on_step=on_step)


class References:
    """The references of all probes at one workload, without dropout; they serve to check any candidate."""

    def __init__(  # noqa: PLR0913 - everything that they depend on
        self,
        workload: Workload,
        seed: int,
        on_step: Callable[[], object] = lambda: None,
        *,
        is_brief: bool = False,
        turn: int | None = None,
        is_apart: bool = False,
    ) -> None:
        """Compute the reference of every probe (kind of inputs) or, if `is_brief`, only that of `normal` inputs.

        If `turn` is given, only one of the probes IN_TURN is used: the one with this number or, if that is impossible,
        the next possible one. Probes that raise VacuousError at this workload are left out. If candidates are in
        another process (`is_apart`), the references need not be on the workload's device, so small workloads are judged
        on the host. `on_step` is called before each probe, rule, and known mistake of a diagnosis.

        Raises:
            ValueError: every probe raises VacuousError here, or a reference output is not finite.
        """
        self.alignment_bytes = device(workload.device).alignment_bytes  # of the candidate's device
        self.workload = workload = oracle.on_host(workload) if is_apart else workload
        self.seed, self.on_step, self.is_brief, self._reason = seed, on_step, is_brief, ""
        later = () if turn is None or is_brief else (*IN_TURN[turn:], *IN_TURN[:turn])
        always = ["normal"] if is_brief else [probe for probe in PROBES if probe not in later]
        self.by_probe = dict(self._possible(always)) | dict(islice(self._possible(later), 1))
        forget_drawn()
        if not self.by_probe:
            raise ValueError(self._reason)

    def _possible(self, probes: Iterable[str]) -> Iterator[tuple[str, Reference]]:
        """Yield (probe, reference) for those of the probes that raise no VacuousError at the workload."""
        plain = msgspec.structs.replace(self.workload, dropout=0.0)
        for probe in probes:
            self.on_step()
            try:
                found = reference_for_probe(plain, probe, self.seed, self.on_step)
                _ = found.screen  # computed here, so that its time does not count for a candidate
            except VacuousError as error:
                self._reason = self._reason or str(error)
            else:
                yield probe, found

    def completed(self) -> "References":
        """Return these references with those of the probes that `turn` left out; unchanged if `is_brief`."""
        if self.is_brief:
            return self
        whole = copy.copy(self)
        found = self.by_probe | dict(self._possible(probe for probe in PROBES if probe not in self.by_probe))
        whole.by_probe = {probe: found[probe] for probe in PROBES if probe in found}
        forget_drawn()
        return whole

    def without(self, others: "References") -> "References | None":
        """Return the references of the probes that `others` lack, for no rules; None if there are none."""
        rest = copy.copy(self)
        rest.by_probe = {probe: each for probe, each in self.by_probe.items() if probe not in others.by_probe}
        rest.is_brief = True
        return rest if rest.by_probe else None


@torch.enable_grad()  # tolerances may be computed within torch.no_grad
def answers(
    workload: Workload, inputs: Inputs, grad_rows: Tensor, answer: Callable[[Inputs], Tensor]
) -> dict[str, Tensor]:
    """Return by name the output of `answer` and, except in inference, gradients of inputs and canonical weights."""
    if workload.direction == "inference":
        return {"output": answer(inputs)}
    watched = inputs.map(lambda tensor: tensor.detach().requires_grad_())
    output = answer(watched)
    leaves = dict(watched.tensors)
    if workload.scope == "module":
        leaves |= {f"{name} weights": tensor for name, tensor in watched.weights.tensors().items()}
    made = torch.autograd.grad(
        output, list(leaves.values()), grad_rows.to(output.dtype), allow_unused=True, materialize_grads=True
    )
    named = {f"gradient of {name}": tensor.detach() for name, tensor in zip(leaves, made, strict=True)}
    return {"output": output.detach()} | named


def _sizes_of_terms(scattered: Sequence[Mapping[str, Tensor]]) -> dict[str, RowErrors]:
    """Return the sizes of the terms in each row of each gradient, by name, from answers of `oracle.scattered`."""
    sizes = {}
    for name in scattered[0].keys() - {"output"} if scattered else ():
        axis = row_axis(name)
        sizes[name] = by_row(torch.stack([each[name] for each in scattered], dim=-1), axis - (axis < 0))
    return sizes


def row_axis(name: str) -> int:
    """Return the axis of a tensor's rows: -2 for queries, keys and tokens, 0 for other operands and for parameters."""
    return -2 if name == "output" or name.removeprefix("gradient of ") in TOKENS else 0


def is_half(workload: Workload) -> bool:
    """Return whether the workload's dtype has fewer bits than float32."""
    return torch.finfo(TORCH_DTYPES[workload.dtype]).bits < 32  # noqa: PLR2004 - float32's


def roundings(workload: Workload, name: str, score_bound: float) -> float:
    """Return the largest error of correct code in the tensor `name`, in roundings of the workload's dtype.

    A sum of n terms is off by about sqrt(n) roundings, in any order of the terms (N. J. Higham, Accuracy and Stability
    of Numerical Algorithms, section 2.8). A score s is a sum of K products: its roundings, and the two of its row's
    logsumexp, change a weight by (sqrt(K) + 2) |s|, with |s| at most `score_bound`.

    In half precision, the yardsticks already include the roundings of the scores, and sums should be in float32. So a
    tensor may be off by one rounding, or by more if kernels sum it over blocks of queries (docs/adr/0044).
    """
    if is_half(workload):
        in_loop = PER_ROOT_IN_HALF * math.sqrt(workload.seq_len) if name in OVER_QUERIES else 0.0
        return 1.0 if name in BY_QUERY else max(SUMS_IN_HALF, in_loop)
    in_scores = (math.sqrt(workload.head_dim) + 2) * score_bound
    return PER_ROOT * (math.sqrt(max(workload.seq_len, workload.kv_len)) + in_scores)


def scales_of(expected: dict[str, Tensor]) -> dict[str, float]:
    """Return for each tensor, by name, the largest absolute value among the tensors of its kind.

    The kinds are the output, the gradients of tokens, and the gradients of weights; any other gradient is a kind by
    itself: that of a sink, for example, is a sum over all queries. Gradients of one kind are sums of terms of similar
    size, so they share a scale: where the terms of one tensor cancel, its values are no more than roundings.
    """
    tokens = {f"gradient of {name}" for name in TOKENS}
    kinds = {name: "tokens" if name in tokens else "weights" * name.endswith(" weights") or name for name in expected}
    largest_of = dict[str, float]()  # by kind
    for name, tensor in expected.items():
        size = float(tensor.abs().max())
        largest_of[kinds[name]] = max(largest_of.get(kinds[name], size), size)
    return {name: largest_of[kinds[name]] for name in expected}


def group_sum(workload: Workload, grad_rows: Tensor) -> float:
    """Estimate the size of intermediate sums in the gradient of value from `grad_rows` (B, H, R, V) or (B, R, D).

    These are sums over the query heads that read a value head; the result is 0 if only one head reads it. With few keys
    the terms may cancel in every element, and only their roundings remain. A query's largest weight on S keys is at
    least 1/S, so each head adds at least this share of the output's gradient.
    """
    readers = workload.num_heads // workload.num_kv_heads
    return readers * float(grad_rows.abs().max()) / workload.kv_len if readers > 1 else 0.0


def largest(candidate: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference; NaN if any difference is NaN."""
    return float((candidate.double() - reference).abs().max())


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference. It is infinite if only one of two elements is finite, 0 if neither is."""
    one, other = one.double().cpu(), other.double().cpu()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    return float((one - other).abs().where(one.isfinite(), 0.0).max()) if one.numel() else 0.0


@dataclass(frozen=True)
class Observation:
    """A candidate's answer: its whole output, and the compared tensors by name."""

    output: Tensor  # detached
    compared: dict[str, Tensor]
    has_backward: bool = True


def call_candidate(candidate: Implementation | Caller, reference: Reference, form: str = "") -> Observation:
    """Call a candidate with copies of a reference's inputs; `form` replaces the form of a cache (see `batch.Cache`).

    Raises:
        FormError: the output has the wrong type, shape or dtype.
        SideEffectError: the call changed its inputs, the mask, or the random seed.
        UncheckableError: a gradient that is to be timed cannot be compared.
        Exception: any error that the candidate raises.
    """
    workload = reference.workload
    grad_output = None if reference.grad_output is None else reference.grad_output.clone()
    call = call_on(copied(reference.inputs, workload), workload, grad_output=grad_output)
    if form and call.mask.cache is not None:
        call.mask.cache = msgspec.structs.replace(call.mask.cache, form=form)
    answer = caller_of(candidate).call(call)
    observed = reference.observe(answer.output)
    if reference.grad_output is not None:
        if not answer.gradients:
            return replace(observed, has_backward=False)
        observed.compared.update(reference.at_rows(answer.gradients))
    missing = sorted(set(reference.expected) - set(observed.compared))
    if missing and workload.direction in {"backward", "forward_backward"}:
        raise UncheckableError(f"the {', '.join(missing)} cannot be checked: the module has no pack(weights)")
    return observed


def errors(observed: dict[str, Tensor], reference: Reference) -> tuple[TensorError, ...]:
    """Compare tensors with the reference; the result omits finite tensors for which the reference has no tolerance."""
    lost = partial(TensorError, error=None, allowed=0.0, worst=(), expected=0.0)
    known = reference.expected
    compared = [reference.judge(name, tensor) for name, tensor in observed.items() if name in known]
    others = [name for name in observed if name not in known]
    return (*compared, *(lost(tensor=name, actual=None) for name in others if not observed[name].isfinite().all()))


def output_error(output: Tensor, reference: Reference) -> tuple[TensorError, Reference]:
    """Compare an output at the reference's rows, then at `at_suspects` rows; return (error, reference at its rows).

    The error at the suspect rows is returned only if it exceeds its limit and the reference's rows agree.

    Raises:
        VacuousError: see `Reference.tolerances`.
    """
    compared = reference.judge("output", reference.observe(output).compared["output"])
    if compared.agrees and (wider := reference.at_suspects(output)) is not None:
        suspected = wider.judge("output", wider.observe(output).compared["output"])
        # These rows were chosen for their errors, so their RMS error says nothing.
        if suspected.error is None or suspected.error > suspected.allowed:
            return suspected, wider
    return compared, reference


def apply_empty_row_convention(
    seen: Observation, reference: Reference, only: str | None = None
) -> tuple[Observation, str]:
    """Replace accepted answers to queries that see no key by right ones; return (observation, convention's name).

    The right answer is 0, as in scaled_dot_product_attention; the other answers in CONVENTIONS, here called
    conventions, do not count as wrong. The textbook form gives NaN. A mask with a large finite number instead of -inf
    gives the mean of all values or, if the scores keep their differences, attention without a mask, as in cuDNN. NaN in
    gradients is replaced, too, where the textbook form has it. After a finite answer no gradients are compared, because
    such queries contribute to them.

    If there are no such queries, or if their answer is right or follows no convention, nothing is replaced, and the
    name is "". `only` is the convention on another probe (kind of inputs), if known, because it must be the same on all
    probes.
    """
    every = None if only == "" else _empty_rows(seen, reference)
    if every is None or not (empty := every[..., reference.rows]).any():
        return seen, ""
    expected = reference.expected
    observed = {name: tensor.double().cpu() for name, tensor in seen.compared.items() if name in expected}
    right, actual = expected["output"][empty], observed["output"][empty]

    def replaced(settled: dict[str, Tensor], kind: str) -> tuple[Observation, str]:
        output = seen.output.clone()
        output[every.to(output.device)] = right[0].to(output)
        return replace(seen, output=output, compared=settled), kind

    is_nan = actual.isnan()
    if only in {None, "nan", "nan_gradient"} and (not is_nan.any() or is_nan.all()):
        form = reference.answers_of(NAN, has_gradients=len(observed) > 1)
        settled = {
            name: tensor.where(~(tensor.isnan() & form[name].isnan()), expected[name])
            for name, tensor in observed.items()
        }
        if any(tensor.isnan().any() and not settled[name].isnan().any() for name, tensor in observed.items()):
            constant = {name: each.nan_to_num(0.0) for name, each in seen.compared.items() if name not in observed}
            return replaced(settled | constant, "nan" if is_nan.all() else "nan_gradient")
    kinds, dtype = dict[float, str](), TORCH_DTYPES[reference.workload.dtype]
    for kind, finite in FINITE.items():
        exact, rounded = (
            reference.answers_of(finite, each, has_gradients=False)["output"] for each in (torch.float64, dtype)
        )
        slack = EMPTY_YARDSTICKS * largest(rounded, exact)  # the rounding error of the form's answer
        slack += EMPTY_ROUNDINGS * torch.finfo(dtype).eps * largest(exact, expected["output"])
        apart = largest(actual, exact[empty])
        is_near = apart <= reference.tolerance("output") + slack and apart < NEARER * largest(actual, right)
        if is_near and only in {None, kind}:
            kinds[apart] = kind
    if not kinds:
        return seen, ""
    return replaced({"output": observed["output"].where(~empty[..., None], expected["output"])}, kinds[min(kinds)])


def _empty_rows(seen: Observation, reference: Reference) -> Tensor | None:
    """Return whether each query sees no key: (B, H, T), or (B, T) in scope `module`; None if every query sees one.

    With sinks the result is None, too, because every query sees its head's sink.
    """
    workload = reference.workload
    sizes = workload.batch_size, workload.seq_len, workload.kv_len
    if workload.sinks != "none" or not workload.mask_rule.has_empty_rows(*sizes):
        return None
    empty = ~oracle.row_mask(workload, torch.arange(workload.seq_len)).seen.any(dim=-1)  # (B,1,T)
    return empty[:, 0] if seen.output.dim() == 3 else empty.expand(-1, workload.num_heads, -1)  # noqa: PLR2004 - (B,T,D)
