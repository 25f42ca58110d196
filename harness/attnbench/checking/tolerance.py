"""Tolerances that correct code meets in its dtype: one rule for outputs, gradients, models, ranks and dropout.

The yardsticks are textbook forms in the workload's dtype, on the inputs unchanged and moved by a rounding. A tensor is
divided into segments of rows (queries, keys or tokens; for a parameter, its first axis), because the size of numbers
may differ between rows by a factor of ten: under a causal mask early queries average few values. Each segment has two
limits, for the largest error and for the root mean square (RMS) of the errors. A limit is a multiple of the yardsticks'
error plus some roundings.

With few numbers, all yardsticks may be exact by luck. A segment therefore contains at least LEAST_NUMBERS numbers, or
the whole tensor. The yardsticks' error of a segment is raised to NEIGHBOUR_SHARE of that in adjacent segments and, in
gradients, to the same share of the largest relative error of segments with large numbers. The roundings are those of
numbers no smaller than FLOOR_SHARE of the tensor's largest. `python -m studies.margins` shows correct code's margins.

An error beyond its limit is *wrong*, unless it looks like roundings of correct code that add up, as when a kernel sums
in half precision: then it is *imprecise*. Such errors are at most IMPRECISE_FACTOR times their limit, are spread over
the tensor, and hardly correlate with the answer. The errors of rows that are 5 % too large do: they are proportional to
the answer. In half precision some correlation is accepted: if 64 partial outputs and their weights are merged in it,
the sum of the weights is rounded, too, which makes each row too large or too small by a share of its own. A gradient in
half precision may also exceed its limit in one of many segments, by up to ONE_FACTOR times. For example, one of twenty
draws shows this if sums of a softmax over 2,048 keys are off by some percent for one query.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnbench.storage.records import TensorError

LEAST_NUMBERS = 1024
NEIGHBOUR_SHARE = 0.5
FLOOR_SHARE = 1 / 16
YARDSTICKS_PER_LIMIT = 2.5
"""Limit of an error, in yardstick errors; correct code shows at most half of it."""
ROUNDINGS_PER_LIMIT = 1.5
RMS_YARDSTICKS_PER_LIMIT = 2.0
RMS_ROUNDINGS_PER_LIMIT = 1.0
IMPRECISE_FACTOR = 5.0
ONE_FACTOR, MANY = 3.0, 16
MOST_CORRELATION = 0.3
"""Largest correlation with the answer of errors that may be roundings. Errors in proportion to the answer have 1, and n
roundings have about 1 / sqrt(n)."""
MOST_CORRELATION_IN_HALF = 0.75
"""The same limit in half precision: correct merges show up to 0.73, and answers too large by 2 % at least 0.95."""
LOST_SHARE = 0.1
"""A gradient loses its digits if the yardsticks' RMS error exceeds this share of its RMS. A few draws then say little
about the errors of correct code, so limits grow in proportion, up to MOST_LENIENCY."""
MOST_LENIENCY = 8.0
VANISHING_SHARE = 1e-12  # a tensor smaller than this share of the terms that it sums is 0 except for roundings
LEAST_SPREAD = 0.25
"""Errors beyond their limits are imprecise, not wrong, only if they are spread over the tensor: the median over
segments of RMS error / limit must be at least this share of the largest."""


class RowErrors(NamedTuple):
    """The largest absolute value and the mean square of the numbers in each row, both (R,)."""

    peak: Tensor
    square: Tensor


def by_row(tensor: Tensor, axis: int) -> RowErrors:
    """Summarize each row of a tensor, which contains errors or an answer; `axis` is the axis of its rows."""
    numbers = tensor.detach().double()
    rows = numbers.movedim(axis, 0).flatten(1) if numbers.dim() > 1 else numbers[:, None]
    return RowErrors(peak=rows.abs().amax(dim=1).cpu(), square=rows.square().mean(dim=1).cpu())


class Tolerance:
    """The limits of one tensor's errors, by segment of rows."""

    def __init__(  # noqa: PLR0913 - a tensor, the errors of honest forms, and the rounding of its dtype
        self,
        name: str,
        expected: Tensor,
        yardsticks: Sequence[RowErrors],
        *,
        axis: int,
        dtype: torch.dtype,
        num_roundings: float = 1.0,
        scale: float = 0.0,
        leniency: float = 1.0,
        labels: Tensor | None = None,
        terms: RowErrors | None = None,
    ) -> None:
        """Derive the limits of tensor `name` from the right answer, in float64 on the CPU, and the yardsticks' errors.

        Without yardsticks the limits are the smallest ones: those for roundings alone. `axis` is the axis of the
        tensor's rows. A number may be off by `num_roundings` roundings of `dtype`; their size follows from the tensor's
        largest number, or from `scale` if that is larger. `leniency` widens all limits. `labels` (R,) are the indices
        of rows in reports, such as those of chosen queries; by default rows count from 0. `terms` are the sizes of the
        terms that each row sums: they replace the row's own numbers as the size of its roundings where they are larger.
        """
        self.name, self.expected, self.axis = name, expected, axis
        rows = by_row(expected, axis)
        self.num_rows = len(rows.peak)
        self.labels = torch.arange(self.num_rows) if labels is None else labels
        per_row = expected.numel() // self.num_rows
        length = max(1, math.ceil(LEAST_NUMBERS / per_row))  # rows of a segment
        self.count = max(1, self.num_rows // length)
        self.segment = (torch.arange(self.num_rows) // length).clamp(max=self.count - 1)  # (R,) each row's segment
        is_gradient = name.startswith("gradient of ")
        self.is_half = torch.finfo(dtype).bits < 32  # noqa: PLR2004 - float32's
        self.is_half_gradient = is_gradient and self.is_half
        none = RowErrors(torch.zeros_like(rows.peak), torch.zeros_like(rows.square))
        answer, shown = self._by_segment(rows), [self._by_segment(each) for each in (none, *yardsticks)]
        yardstick = RowErrors(*(torch.stack(each).amax(dim=0) for each in zip(*shown, strict=True)))
        self.is_finite = bool(yardstick.square.isfinite().all())
        whole = RowErrors(rows.peak.max(), rows.square.mean().sqrt())
        is_zero = float(whole.peak) <= VANISHING_SHARE * scale
        if is_gradient and not is_zero:
            lost = max((float(each.square.mean().sqrt() / whole.square) for each in yardsticks), default=0.0)
            leniency *= min(max(1.0, lost / LOST_SHARE), MOST_LENIENCY)
        few = 1 + 1 / expected.numel()  # with few numbers, a few draws may miss the largest error
        one = torch.finfo(dtype).eps / 2 * num_roundings  # their sum for a number of size 1
        rounding = RowErrors(*(one * each for each in _sizes(answer, whole, scale)))
        if terms is not None:
            summed = self._by_segment(terms)
            rounding = RowErrors(*map(torch.maximum, rounding, (one * each for each in summed)))
            answer = RowErrors(*map(torch.maximum, answer, summed))
        yardstick = RowErrors(*map(_with_neighbours, yardstick))
        if is_gradient:
            yardstick = yardstick if is_zero else RowErrors(*map(_with_others, yardstick, answer))
            one_row = rounding.peak / math.sqrt(self.num_rows / self.count)  # RMS of a segment with one such row
            rounding = RowErrors(rounding.peak, torch.maximum(rounding.square, one_row))
        factor = few * leniency
        self.limit = RowErrors(
            factor * (YARDSTICKS_PER_LIMIT * yardstick.peak + ROUNDINGS_PER_LIMIT * rounding.peak),
            factor * (RMS_YARDSTICKS_PER_LIMIT * yardstick.square + RMS_ROUNDINGS_PER_LIMIT * rounding.square),
        )

    def _by_segment(self, rows: RowErrors) -> RowErrors:
        """Combine rows into N segments: the largest number and the root mean square of each segment, both (N,)."""
        empty = torch.zeros(self.count, dtype=torch.float64)
        mean = empty.scatter_reduce(0, self.segment, rows.square, "mean", include_self=False)
        return RowErrors(empty.scatter_reduce(0, self.segment, rows.peak, "amax"), mean.sqrt())

    @property
    def of_rows(self) -> Tensor:
        """The largest error allowed in each row (R,)."""
        return self.limit.peak[self.segment]

    @property
    def of_elements(self) -> Tensor:
        """The largest error allowed, in a shape that broadcasts to the tensor."""
        return self._along_rows(self.of_rows)

    def _along_rows(self, rows: Tensor) -> Tensor:
        shape = [1] * self.expected.dim()
        shape[self.axis] = self.num_rows
        return rows.view(shape)

    @property
    def largest(self) -> float:
        """The largest error allowed anywhere."""
        return float(self.limit.peak.max())

    def judge(self, candidate: Tensor) -> TensorError:
        """Compare a tensor with the right answer; `worst` is the index with the largest ratio of error to limit."""
        actual, apart, rows, shown = self._errors(candidate)
        row = int(_ratio(rows.peak, self.of_rows).argmax())
        by_axis = apart.movedim(self.axis, 0)
        inside = np.unravel_index(int(by_axis[row].abs().argmax()), by_axis.shape[1:])
        place = [int(each) for each in inside]
        place.insert(self.axis % apart.dim(), row)
        ratios = _ratio(shown.square, self.limit.square)
        worst = int(ratios.argmax())
        error, value = float(rows.peak[row]), float(actual[tuple(place)])
        rms = float(shown.square[worst])
        reported = [*place]
        reported[self.axis % apart.dim()] = int(self.labels[row])
        places = self.labels[self.segment == worst]
        return TensorError(
            tensor=self.name,
            error=error if math.isfinite(error) else None,
            allowed=float(self.of_rows[row]),
            worst=tuple(reported),
            expected=float(self.expected[tuple(place)]),
            actual=value if math.isfinite(value) else None,
            rms=rms if math.isfinite(rms) else None,
            allowed_rms=float(self.limit.square[worst]),
            rows=(int(places[0]), int(places[-1]) + 1),
            largest=float(self.expected.abs().max()),
            is_rounding=self._is_rounding(apart, shown),
        )

    def beyond(self, candidate: Tensor) -> Tensor:
        """Mark errors beyond their limit, or beyond the RMS limit in segments where only the RMS exceeds its limit."""
        _, apart, _, shown = self._errors(candidate)
        is_broad = (_ratio(shown.square, self.limit.square) > 1) & (_ratio(shown.peak, self.limit.peak) <= 1)
        limits = self.limit.peak.where(~is_broad, self.limit.square)[self.segment]
        return ~(apart.abs() <= self._along_rows(limits))

    def _errors(self, candidate: Tensor) -> tuple[Tensor, Tensor, RowErrors, RowErrors]:
        """Return the candidate in float64, its errors (infinite if not finite), and their sizes by row and segment."""
        actual = candidate.detach().double().cpu()
        apart = actual - self.expected
        apart = apart.where(apart.isfinite(), torch.inf)
        rows = by_row(apart, self.axis)
        return actual, apart, rows, self._by_segment(rows)

    def _is_rounding(self, apart: Tensor, shown: RowErrors) -> bool:
        """Return whether errors beyond their limits may be roundings that add up, as described in this module."""
        peaks, ratios = _ratio(shown.peak, self.limit.peak), _ratio(shown.square, self.limit.square)
        factor = max(float(peaks.max()), float(ratios.max()))
        if not 1 < factor <= IMPRECISE_FACTOR:
            return False
        is_beyond = (peaks > 1) | (ratios > 1)
        if self.is_half_gradient and factor <= ONE_FACTOR and int(is_beyond.sum()) == 1 and self.count >= MANY:
            return True
        if float(ratios.median()) < LEAST_SPREAD * float(ratios.max()):
            return False
        beyond = is_beyond[self.segment]
        error, answer = (each.movedim(self.axis, 0)[beyond].flatten() for each in (apart, self.expected))
        most = MOST_CORRELATION_IN_HALF if self.is_half else MOST_CORRELATION
        return abs(float(torch.nn.functional.cosine_similarity(error, answer, dim=0))) <= most


def _sizes(answer: RowErrors, whole: RowErrors, scale: float) -> Iterator[Tensor]:
    """Yield the largest and the RMS size of the rounded numbers in each segment (N,); `whole` is that of all rows."""
    if float(whole.peak) <= VANISHING_SHARE * scale:
        yield from (torch.full_like(each, scale) for each in answer)
        return
    cancels = max(1.0, scale / float(whole.peak))  # cancelled terms leave their roundings
    floor = min(1.0, FLOOR_SHARE * cancels)
    yield from (each.clamp(min=floor * float(top)) * cancels for each, top in zip(answer, whole, strict=True))


def _with_neighbours(shown: Tensor) -> Tensor:
    """Raise the yardsticks' error of each segment (N,) to NEIGHBOUR_SHARE of the error of its adjacent segments."""
    padded = torch.nn.functional.pad(NEIGHBOUR_SHARE * shown, (1, 1))
    return torch.stack([shown, padded[:-2], padded[2:]]).amax(dim=0)


def _with_others(shown: Tensor, answer: Tensor) -> Tensor:
    """Raise the yardsticks' error of each segment (N,) to a share of the largest relative error of large segments.

    If a key's gradient comes from one query, all its numbers have the same rounding, which may be 0 by luck.
    """
    relative = (shown / answer)[(answer > 0) & (answer >= FLOOR_SHARE * answer.max())]
    return torch.maximum(shown, NEIGHBOUR_SHARE * relative.max() * answer) if len(relative) else shown


def _ratio(shown: Tensor, limit: Tensor) -> Tensor:
    """Divide each error by its limit: 0 where the error is 0, infinite where only the limit is 0."""
    return torch.where(shown > 0, shown / limit, 0.0)
