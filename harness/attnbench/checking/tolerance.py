"""Tolerances that correct code meets in its dtype: for outputs, gradients, models, dropout and calls over ranks.

Yardsticks show the errors of correct code: they are textbook forms in the workload's dtype, computed on the inputs and
on copies of these changed by a rounding. A tensor is divided into segments of rows (queries, keys or tokens; for a
parameter, its first axis), because the size of numbers may differ between rows by a factor of ten: under a causal mask
early queries average few values. Each segment has two limits, one for the largest error and one for the root mean
square (RMS) of the errors. A limit is a multiple of the yardsticks' error plus some roundings.

With few numbers, all yardsticks may be exact by luck. A segment therefore contains at least LEAST_NUMBERS numbers, or
the whole tensor. A segment's yardstick error counts as at least NEIGHBOUR_SHARE times that of adjacent segments and, in
gradients, as at least the same share of the largest relative error in segments with large numbers. A rounding counts as
at least that of a number FLOOR_SHARE times the tensor's largest. `python -m studies.margins` shows correct code's
margins.

An error beyond its limit is *wrong*, unless it looks like roundings of correct code that add up, as when a kernel sums
in half precision: then it is *imprecise*. Imprecise errors are at most IMPRECISE_FACTOR times their limit, are spread
over the tensor, and hardly correlate with the answer. In contrast, errors of rows that are 5 % too large are
proportional to the answer. Half precision allows some correlation: if a kernel merges 64 partial outputs in half
precision, the sum of their weights is rounded, too, so each row is too large or too small by its own share. In half
precision, one of many segments of a gradient may also exceed its limit up to ONE_FACTOR times. This happens in one of
twenty draws if the sum of one query's softmax over 2,048 keys is off by a few percent.
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
"""Limit of an error, as a multiple of the yardsticks' error; errors of correct code are at most half of the limit."""
ROUNDINGS_PER_LIMIT = 1.5
RMS_YARDSTICKS_PER_LIMIT = 2.0
RMS_ROUNDINGS_PER_LIMIT = 1.0
IMPRECISE_FACTOR = 5.0
ONE_FACTOR, MANY = 3.0, 16
MOST_CORRELATION = 0.3
"""Largest correlation between errors and the answer at which the errors may be roundings. It is 1 if errors are
proportional to the answer, and about 1 / sqrt(n) for n roundings."""
MOST_CORRELATION_IN_HALF = 0.75
"""MOST_CORRELATION in half precision: correct merges show up to 0.73; answers that are 2 % too large, at least 0.95."""
LOST_SHARE = 0.1
"""A gradient loses its digits if the yardsticks' RMS error exceeds this share of its RMS. A few draws then say little
about the errors of correct code, so its limits grow in proportion, up to MOST_LENIENCY times."""
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
    """Return the largest absolute value and mean square of each row of a tensor; `axis` is the axis of its rows."""
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

        `yardsticks` are the errors of correct textbook forms by row; without them the limits are the smallest ones:
        those for roundings alone. `axis` is the axis of the tensor's rows. The limits allow `num_roundings` roundings
        of `dtype` in a number. The size of a rounding follows from the numbers of its segment or, where these are
        larger, from `terms`: the sizes of the terms that each row sums. It grows with `scale` if that exceeds the
        tensor's largest number. `leniency` is a factor of all limits. `labels` (R,) are the indices of rows in reports,
        such as those of chosen queries (default: from 0).
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
        one = torch.finfo(dtype).eps / 2 * num_roundings  # sum of all roundings of a number of size 1
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
        """Compare a tensor with the right answer; the ratio of error to limit is largest at the result's `worst`."""
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
        """Return the candidate in float64, its errors (inf where not finite), and their sizes by row and by segment."""
        actual = candidate.detach().double().cpu()
        apart = actual - self.expected
        apart = apart.where(apart.isfinite(), torch.inf)
        rows = by_row(apart, self.axis)
        return actual, apart, rows, self._by_segment(rows)

    def _is_rounding(self, apart: Tensor, shown: RowErrors) -> bool:
        """Return whether errors beyond their limits may be roundings that add up: see this module's docstring."""
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
    """Yield the largest and the RMS size of rounded numbers in each segment (N,); `whole` has those of the tensor."""
    if float(whole.peak) <= VANISHING_SHARE * scale:
        yield from (torch.full_like(each, scale) for each in answer)
        return
    cancels = max(1.0, scale / float(whole.peak))  # cancelled terms leave their roundings
    floor = min(1.0, FLOOR_SHARE * cancels)
    yield from (each.clamp(min=floor * float(top)) * cancels for each, top in zip(answer, whole, strict=True))


def _with_neighbours(shown: Tensor) -> Tensor:
    """Raise the yardsticks' error of each segment (N,) to at least NEIGHBOUR_SHARE times that of adjacent segments."""
    padded = torch.nn.functional.pad(NEIGHBOUR_SHARE * shown, (1, 1))
    return torch.stack([shown, padded[:-2], padded[2:]]).amax(dim=0)


def _with_others(shown: Tensor, answer: Tensor) -> Tensor:
    """Raise each segment's relative error to a share of the largest relative error in segments with large numbers.

    If a key's gradient comes from one query, all its numbers have the same rounding, which may be 0 by luck.
    """
    relative = (shown / answer)[(answer > 0) & (answer >= FLOOR_SHARE * answer.max())]
    return torch.maximum(shown, NEIGHBOUR_SHARE * relative.max() * answer) if len(relative) else shown


def _ratio(shown: Tensor, limit: Tensor) -> Tensor:
    """Divide each error by its limit: 0 where the error is 0, infinite where only the limit is 0."""
    return torch.where(shown > 0, shown / limit, 0.0)
