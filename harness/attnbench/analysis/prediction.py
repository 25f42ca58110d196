"""Predict time and peak memory of cells that were never run, with intervals, from a few cells that were.

What one implementation does is a sum of costs: a constant for its calls, some seconds for each token, each pair and
each multiply-add, for each block of memory that is fresh in every call; tiles, packing and ragged lengths are counted
as PyTorch's kernels have them. A family, which is an implementation on one device, in one dtype and direction and with
one number of threads, has such a sum, with no part below 0, fitted in relative error. What it leaves is smooth in the
logarithms of the sizes, and a Gaussian process adds it. The intervals come from leaving each calibration cell out in
turn (conformal), wider for a family that is harder to predict, and the further from calibrated shapes.

Memory is a count, not a sample: of few candidates, kernels' scratch among them, the law that fits to the byte is taken.

Source: KernelSight-LM's idea of one calibration sweep; J. Lei and others, Distribution-Free Predictive Inference, 2018,
https://arxiv.org/abs/1604.04173; Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 5.4.2.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnbench.analysis.table import rows, workload_of
from attnbench.workloads.counts import every_pair, product_flops, visible_pairs
from attnbench.workloads.workload import DTYPE_BYTES, SIZES, Workload

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Family = tuple[object, ...]
"""The implementation, and the axes that are no sizes, in the order of KIND_AXES."""
KIND_AXES = tuple(axis for axis in Workload.__struct_fields__ if axis not in {*SIZES, "mask", "seed"})
COVERAGE = 0.9
FEWEST_INSIDE = 20
"""Cells within the range of others, by which intervals are set; with fewer, those at its edges count, too."""
FEWEST = 4
"""Cells that a family needs; with fewer nothing is predicted."""
FRESH_BYTES = 2**25
"""Blocks from this size on are fresh in every call: the largest threshold to which the C library goes of its own, see
ALLOCATORS in storage/events.py."""
LENGTH_SCALES = (0.5, 1.0, 2.0)
"""Of the Gaussian process, in natural logarithms of the sizes."""
SIGNALS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Its standard deviation over that of the noise; 0: no correction."""
SAME_OTHER_MASK = 0.6
"""Correlation of what the law leaves under two kinds of mask."""
LEAST_S = 1e-9
EXACT, FEW_BYTES, ROUNDED = 2e-4, 64, 0.02
"""A sum meets a peak that it is so close to, relatively and in bytes; and its shares are so close to quarters."""
WIDE_BYTES, LEAST_PACKED, PRODUCT_BYTES = 4, 64, 5120
"""Of a number in which kernels add up; of so many queries and keys on, the flash kernel packs half precision; what
a product in half precision takes at the least."""
MOST_TENSORS, MOST_TIMES = 4, 4
"""Of a sum of whole tensors, and of one of them."""
LARGEST_SUM, MOST_CHOICES = 5, 200
"""Tensors of a sum in quarters, and choices of cells that are tried for each."""
MOST_UNEXPLAINED = 0.5
"""Where more of the cells are met by no exact sum, one of any shares is fitted."""
TILE_KEYS, LINE = 512, 32
"""Keys of a tile of PyTorch's flash kernel, and of a block of a product in half precision: what is ragged is copied."""
PEAK = "peak_memory_bytes"
BEYOND = 0.1
"""Sizes further than this outside the calibrated range, in natural logarithms, are an extrapolation."""
LEAST_SPREAD = 0.005
SHORT_LEN, LONG_LEN = 192, 768
"""Between these PyTorch's kernel on the CPU takes tiles of other heights:
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/FlashAttentionKernel.cpp."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one call; `low` and `high` bound a 90 % interval. Memory is None where the calibration did not count it."""

    seconds: float
    low: float
    high: float
    peak_bytes: float | None
    peak_low: float | None
    peak_high: float | None
    is_extrapolated: bool  # some size is outside of what was calibrated


def kind_of(mask: str) -> str:
    """The mask without its numbers: "padding" of padding(3,4)."""
    return re.sub(r"\([^)]*\)", "", mask)


def family(workload: Workload, implementation: str) -> Family:
    """Cells of which something can be learnt for one another."""
    return implementation, *(getattr(workload, axis) for axis in KIND_AXES)


def coordinates(workload: Workload) -> Array:
    """Where a workload lies among others: natural logarithms of B * H, T, S, K, V, and H / G, D / (H * K)."""
    width = workload.num_heads * workload.head_dim
    sizes = (
        workload.batch_size * workload.num_heads,
        workload.seq_len,
        workload.kv_len,
        workload.head_dim,
        workload.value_dim / workload.head_dim,
        workload.num_heads / workload.num_kv_heads,
        workload.embed_dim / width,
    )
    found: Array = np.log(np.array(sizes, dtype=float))
    return found


def costs(workload: Workload) -> Array:
    """What a call may cost time for: counts, each of which has a price in a family. VIEWS says which go together."""
    heads, batch = workload.num_heads, workload.batch_size
    query_rows, key_rows = heads * batch * workload.seq_len, heads * batch * workload.kv_len
    pairs, visible = heads * every_pair(workload), heads * visible_pairs(workload)
    width = (workload.head_dim + workload.value_dim) / 2
    size = DTYPE_BYTES[workload.dtype]
    blocks = (pairs * size, query_rows * workload.head_dim * size, key_rows * workload.head_dim * size)
    fresh = sum(block for block in blocks if block >= FRESH_BYTES)
    is_masked = float(workload.mask != "none")
    basic = (
        1.0,
        heads * batch,
        query_rows + key_rows,
        query_rows * width,
        key_rows * width,
        pairs,
        pairs * width,
        visible,
        visible * width,
        is_masked,
        is_masked * every_pair(workload) / batch,
        is_masked * pairs,
        fresh,
        product_flops(workload, 0, recomputes_scores=False),
    )
    held = 2 * (query_rows + key_rows) * width * size  # the inputs and the output
    beyond_caches = (
        max(0, pairs * size - 2**21),
        max(0, pairs * size - 2**23),
        max(0, held - 2**20),
        max(0, held - 2**21),
    )
    is_short, is_long = workload.seq_len < SHORT_LEN, workload.seq_len >= LONG_LEN
    tiles = (is_short * pairs, is_short * pairs * width, is_long * pairs * width)
    copies = 2 + 2 * (workload.direction in {"backward", "forward_backward"}) + is_masked  # of all scores
    trimmed = (copies * pairs * size > 2 * FRESH_BYTES) * pairs * size
    done = heads * batch * tiled_pairs(workload)
    half, is_ragged = size < WIDE_BYTES, workload.kv_len % LINE != 0
    is_packed = half and min(workload.seq_len, workload.kv_len) >= LEAST_PACKED
    halves = (
        half * is_ragged * heads * batch,
        half * is_ragged * key_rows * width,
        half * is_ragged * pairs,
        is_packed * heads * batch,
        is_packed * key_rows * width,
        half * (not is_packed) * pairs * width,
    )
    return np.array([*basic, *beyond_caches, *tiles, trimmed, done, done * width, *halves], dtype=float)


def tile_height(queries: int) -> int:
    """Queries of a tile of PyTorch's flash kernel."""
    return min(queries, 32 if queries < SHORT_LEN else 64 if queries < LONG_LEN else 256)


def tiled_pairs(workload: Workload) -> int:
    """Pairs of one head that the flash kernel computes: whole tiles, but for those that a causal mask hides."""
    queries, keys = workload.seq_len, workload.kv_len
    if kind_of(workload.mask) != "causal":
        return queries * keys
    height, found = tile_height(queries), 0
    for first in range(0, queries, height):
        last = min(first + height, queries)
        found += (last - first) * min(keys, -(-min(last, keys) // TILE_KEYS) * TILE_KEYS)
    return found


BASIC, CACHES, TILES = list(range(14)), [14, 15, 16, 17], [18, 19, 20, 21]
HALVES = list(range(22, 30))
ALWAYS = BASIC + HALVES
VIEWS = (ALWAYS, ALWAYS + CACHES, ALWAYS + TILES, ALWAYS + CACHES + TILES)
"""Laws of so many kinds of cost, whose predictions are averaged: with few cells none of them is sure to be the best."""


def fitted(amounts: Array, values: Array, rounds: int = 3) -> Array:
    """Prices (F,), none below 0, that make amounts (N, F) add up to the values (N,) with small relative errors.

    What is far off counts less in the next round: a cell may have been disturbed.
    """
    from scipy.optimize import nnls

    scaled = amounts / values[:, None]
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    weights = np.ones(len(values))
    prices = np.zeros(amounts.shape[1])
    for _ in range(rounds):
        prices = nnls(weights[:, None] * scaled / norms, weights)[0] / norms
        errors = np.abs(scaled @ prices - 1)
        typical = max(1.48 * float(np.median(errors)), LEAST_SPREAD)
        weights = np.sqrt(np.minimum(1.0, 2 * typical / np.maximum(errors, 1e-12)))
    return prices


@dataclass(frozen=True)
class Smoothing:
    """How a Gaussian process smooths what the laws leave: its length scale, and its signal over the noise."""

    scale: float
    signal: float


class Law:
    """What is known of the time of one family: its cells, and the prices that explain them."""

    def __init__(self, cells: Sequence[tuple[Workload, float]]) -> None:
        """Take workloads and their seconds."""
        self.places = np.array([coordinates(workload) for workload, _ in cells])
        self.kinds = np.array([kind_of(workload.mask) for workload, _ in cells])
        self.amounts = np.array([costs(workload) for workload, _ in cells])
        self.seconds = np.array([seconds for _, seconds in cells])
        everything = np.arange(len(cells))
        self.others = [np.delete(everything, place) for place in everything]
        self.whole = self._prices(everything)
        self.parts = [self._prices(keep) for keep in self.others]
        self.left = np.log(self.seconds) - explained(self.amounts, self.whole)

    def _prices(self, keep: NDArray[np.int_]) -> list[Array]:
        """Prices of each of VIEWS, fitted to those cells alone."""
        return [fitted(self.amounts[keep][:, view], self.seconds[keep]) for view in VIEWS]

    def near(self, place: Array, kind: str, scale: float) -> Array:
        """The correlation of a place with each cell (N,)."""
        square = ((self.places - place) ** 2).sum(axis=1)
        found: Array = np.where(self.kinds == kind, 1.0, SAME_OTHER_MASK) * np.exp(-square / (2 * scale**2))
        return found

    def matrix(self, scale: float) -> Array:
        """The correlation of each cell with each (N, N)."""
        return np.array([self.near(place, kind, scale) for place, kind in zip(self.places, self.kinds, strict=True)])

    def at(self, workload: Workload, smoothing: Smoothing) -> tuple[float, float]:
        """The logarithm of the seconds of a workload, and how uncertain it is against a single cell's noise."""
        near = self.near(coordinates(workload), kind_of(workload.mask), smoothing.scale)
        more, spread = smoothed(self.matrix(smoothing.scale), near, self.left, smoothing.signal)
        return float(explained(costs(workload)[None], self.whole)[0]) + more, spread

    def is_inside(self) -> NDArray[np.bool_]:
        """Whether each cell is within the range of the others, as what is predicted without a mark is (N,)."""
        places = [(self.places[place], self.places[keep]) for place, keep in enumerate(self.others)]
        return np.array([beyond(place, others) <= BEYOND for place, others in places])

    def left_out(self, smoothing: Smoothing) -> tuple[Array, Array]:
        """The error of each cell's logarithm as predicted from all others (N,), and the uncertainty given with it."""
        matrix, logs = self.matrix(smoothing.scale), np.log(self.seconds)
        found = []
        for place, (keep, prices) in enumerate(zip(self.others, self.parts, strict=True)):
            laws = explained(self.amounts, prices)
            left = (logs - laws)[keep]
            more, spread = smoothed(matrix[np.ix_(keep, keep)], matrix[place, keep], left, smoothing.signal)
            found.append((logs[place] - laws[place] - more, spread))
        errors, spreads = np.array(found).T
        return errors, spreads


def explained(amounts: Array, prices: Sequence[Array]) -> Array:
    """The logarithms of the seconds that amounts (N, F) cost: the mean of what VIEWS say (N,)."""
    seconds = [amounts[:, view] @ own for view, own in zip(VIEWS, prices, strict=True)]
    found: Array = np.mean(np.log(np.maximum(seconds, LEAST_S)), axis=0)
    return found


def smoothed(matrix: Array, near: Array, left: Array, signal: float) -> tuple[float, float]:
    """Mean and standard deviation of what is left at a place, by a Gaussian process whose noise is 1.

    `matrix` (N, N) and `near` (N,) are correlations.
    """
    power = signal**2
    solved = np.linalg.solve(power * matrix + np.eye(len(left)), np.column_stack([left, power * near]))
    mean, less = power * near @ solved
    return float(mean), math.sqrt(max(1.0, 1 + power - float(less)))


class Predictor:
    """What was learnt from calibration cells. `predict` answers from it alone."""

    def __init__(self, laws: Mapping[Family, Law], peaks: Mapping[Family, "Peaks"]) -> None:
        """Choose the smoothing under which left-out cells are predicted best, and how wide intervals must be."""
        self.laws, self.peaks = laws, peaks
        tried = {}
        for scale, signal in product(LENGTH_SCALES, SIGNALS):
            smoothing = Smoothing(scale, signal)
            errors, spreads = map(np.concatenate, zip(*(law.left_out(smoothing) for law in laws.values()), strict=True))
            tried[smoothing] = errors, spreads
        self.smoothing = min(tried, key=lambda each: float(np.mean(np.minimum(np.abs(tried[each][0]), 0.5))))
        self.errors, spreads = tried[self.smoothing]
        self.scales = self._scales(np.abs(self.errors) / spreads)
        scaled = np.abs(self.errors) / spreads / np.repeat(list(self.scales.values()), self._numbers)
        inside = np.concatenate([law.is_inside() for law in laws.values()])
        self.width = quantile(scaled[inside] if inside.sum() >= FEWEST_INSIDE else scaled)

    @property
    def _numbers(self) -> list[int]:
        """Cells of each law."""
        return [len(law.seconds) for law in self.laws.values()]

    def _scales(self, errors: Array) -> dict[Family, float]:
        """How far off each family typically is, drawn towards what all are: a few cells do not tell."""
        ends = np.cumsum([0, *self._numbers])
        whole, found = float(np.mean(errors)), {}
        for key, first, last in zip(self.laws, ends[:-1], ends[1:], strict=True):
            found[key] = (float(errors[first:last].sum()) + FEWEST_INSIDE * whole) / (last - first + FEWEST_INSIDE)
        return {key: max(scale, LEAST_S) for key, scale in found.items()}

    @property
    def num_cells(self) -> int:
        """Cells that were learnt from."""
        return len(self.errors)

    def predict(self, workload: Workload, implementation: str) -> Prediction | None:
        """Time and peak memory of a cell; None where nothing like it was calibrated."""
        law = self.laws.get(family(workload, implementation))
        if law is None or kind_of(workload.mask) not in law.kinds:
            return None
        log, spread = law.at(workload, self.smoothing)
        outside = beyond(coordinates(workload), law.places)
        half = self.width * self.scales[family(workload, implementation)] * spread * (1 + max(0.0, outside))
        known = self.peaks.get(family(workload, implementation))
        peak = known.at(workload) if known is not None else (None, None, None)
        return Prediction(
            seconds=math.exp(log),
            low=math.exp(log - half),
            high=math.exp(log + half),
            peak_bytes=peak[0],
            peak_low=peak[1],
            peak_high=peak[2],
            is_extrapolated=outside > BEYOND,
        )


def beyond(place: Array, places: Array) -> float:
    """How far a place is outside of the range of others, in natural logarithms; 0 or less: not at all."""
    return float(np.maximum(places.min(axis=0) - place, place - places.max(axis=0)).max())


def quantile(values: Array) -> float:
    """What COVERAGE of further values is below, by the rule of conformal prediction."""
    place = math.ceil(COVERAGE * (len(values) + 1)) - 1
    return float(np.sort(values)[min(place, len(values) - 1)])


def fit(cells: "pd.DataFrame") -> Predictor:
    """Learn from the rows of a table (analysis/table.py); those that are wrong or have no time are left out.

    Raises:
        ValueError: no family has as many cells as it needs.
    """
    timed = cells[(cells["status"] == "ok") & cells["latency_s"].notna()]
    times, peaks = (
        defaultdict[Family, list[tuple[Workload, float]]](list),
        defaultdict[Family, list[tuple[Workload, float]]](list),
    )
    for row in rows(timed):
        workload = workload_of(row)
        key = family(workload, row["implementation"])
        times[key].append((workload, row["latency_s"]))
        if row.get(PEAK) is not None:
            peaks[key].append((workload, row[PEAK]))
    laws = {key: Law(own) for key, own in times.items() if len(own) >= FEWEST}
    if not laws:
        raise ValueError(f"no implementation has {FEWEST} timed cells in the calibration: give it more time")
    return Predictor(laws, {key: Peaks(own) for key, own in peaks.items() if key in laws and len(own) >= FEWEST})


class Peaks:
    """The largest of a few sums of tensors: memory peaks at one of a few moments of a call."""

    def __init__(self, cells: Sequence[tuple[Workload, float]]) -> None:
        """Take workloads and their bytes."""
        amounts = np.array([tensors(workload) for workload, _ in cells])
        peaks = np.array([peak for _, peak in cells])
        self.sums: list[Array] = []
        open_ = np.ones(len(peaks), dtype=bool)
        while open_.any() and (found := exact_sum(amounts, peaks, open_)) is not None:
            self.sums.append(found)
            open_ &= ~meets(amounts @ found, peaks)
        if np.mean(open_) > MOST_UNEXPLAINED:
            self.sums = [fitted(amounts, peaks)]
        errors = np.abs(np.log(np.maximum(self._largest(amounts), 1.0) / peaks))
        self.width = max(EXACT, quantile(errors))

    def _largest(self, amounts: Array) -> Array:
        found: Array = np.max([amounts @ each for each in self.sums], axis=0)
        return found

    def at(self, workload: Workload) -> tuple[float, float, float]:
        """The bytes, and the interval."""
        peak = float(self._largest(tensors(workload)[None])[0])
        return peak, peak * math.exp(-self.width), peak * math.exp(self.width)


def meets(sums: Array, peaks: Array) -> NDArray[np.bool_]:
    """Which sums are the peaks, but for a few Python numbers that a call makes into tensors."""
    found: NDArray[np.bool_] = np.abs(sums - peaks) <= EXACT * peaks + FEW_BYTES
    return found


def tensors(workload: Workload) -> Array:
    """Bytes of what a call may hold: tensors of queries, keys, scores, rows and a mask, and the scratch of kernels.

    PyTorch's flash kernel has a tile of scores for each thread, packs keys and values of half precision, and copies an
    output's gradient that has another layout; a product in half precision has a copy of one head's keys, and a little
    more.
    """
    heads = workload.batch_size * workload.num_heads
    queries, keys, size = workload.seq_len, workload.kv_len, DTYPE_BYTES[workload.dtype]
    threads, half = workload.num_threads or 1, size * (size < WIDE_BYTES)
    height, width = tile_height(queries), min(keys, TILE_KEYS)
    forward = WIDE_BYTES * height * (width + 2 + workload.value_dim) + half * height * width
    backward = 2 * (WIDE_BYTES + half) * height * width + WIDE_BYTES * height
    packed = (min(queries, keys) >= LEAST_PACKED) * half * workload.head_dim * (2 * heads * keys + threads * width)
    cloned = (workload.num_heads > 1) * size * heads * queries * workload.value_dim
    sums_of_rows = WIDE_BYTES * heads * queries
    numbers = (
        heads * queries * workload.value_dim,
        heads * keys * workload.head_dim,
        heads * queries * keys,
        heads * queries,
        queries * keys,
    )
    return np.array(
        [
            *(size * each for each in numbers),
            sums_of_rows + threads * forward + packed,
            sums_of_rows + threads * backward + cloned,
            (workload.mask != "none") * size * queries * keys,
            half * threads * keys * workload.head_dim,
            half * threads * PRODUCT_BYTES,
        ],
        dtype=float,
    )


def exact_sum(amounts: Array, peaks: Array, open_: NDArray[np.bool_]) -> Array | None:
    """Of all sums of few tensors that are nowhere above a peak: the one that meets most of those that are `open_`.

    Sums of whole tensors come first, then those with quarters. None where there is none that meets two.
    """
    best, most = None, 1
    places = np.flatnonzero(open_)
    there = np.flatnonzero(amounts[places].any(axis=0))
    for used, rows_ in chain(whole_sums(there), quarter_sums(amounts, peaks, places, there)):
        sums = amounts[:, used] @ rows_.T  # (N, R)
        met = meets(sums, peaks[:, None])[places].sum(axis=0) * (sums <= (1 + EXACT) * peaks[:, None] + FEW_BYTES).all(
            axis=0
        )
        if met.max(initial=0) > most:
            most, best = int(met.max()), np.zeros(amounts.shape[1])
            best[list(used)] = rows_[int(met.argmax())]
    return best


def whole_sums(there: NDArray[np.int_]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Sums of up to MOST_TENSORS of those tensors, each up to MOST_TIMES: which, and how many of each (R, n)."""
    for size in range(1, min(MOST_TENSORS, len(there)) + 1):
        times = np.array(list(product(range(1, MOST_TIMES + 1), repeat=size)), dtype=float)
        yield from ((used, times) for used in combinations(there, size))


def quarter_sums(
    amounts: Array, peaks: Array, places: NDArray[np.int_], there: NDArray[np.int_]
) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Sums in quarters of those tensors that meet some of the peaks at `places`, as many as they have tensors."""
    draws = np.random.default_rng(0)
    for size in range(1, min(LARGEST_SUM, len(places)) + 1):
        if math.comb(len(places), size) <= MOST_CHOICES:
            chosen = np.array(list(combinations(places, size)))
        else:  # at random: the first cells may all be of another sum
            chosen = np.array([draws.choice(places, size, replace=False) for _ in range(MOST_CHOICES)])
        for used in combinations(there, size):
            square = amounts[chosen[:, :, None], np.array(used)]
            shares = np.einsum("nij,nj->ni", np.linalg.pinv(square), peaks[chosen])
            whole = np.round(4 * shares) / 4
            is_whole = (np.abs(whole - shares) <= ROUNDED).all(axis=1) & (whole > 0).all(axis=1)
            yield used, np.unique(whole[is_whole], axis=0)
