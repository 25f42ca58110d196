"""What a machine can do at most, as seen in the run itself: the fastest matrix product and the fastest copy.

Raw samples are kept; ceilings are read from them. Source of the idea: S. Williams, A. Waterman, D. Patterson, Roofline,
2009, https://doi.org/10.1145/1498765.1498785.
"""

from collections.abc import Iterable
from statistics import median

import msgspec

MATMUL, COPY = "matmul", "copy"
Place = tuple[str, str, int]
"""Device, dtype and number of threads (0: one for each core), as a workload gives them."""


class CeilingSample(msgspec.Struct, frozen=True, array_like=True):
    """Some calls of one load: a matrix product of `size` x `size` matrices, or a copy of `size` bytes.

    `amount` is what one call does: FLOPs of a product, bytes read and written by a copy. `value` is seconds per call.
    """

    kind: str
    dtype: str  # in which it is computed: half precision may be fastest in float32
    size: int
    amount: int
    value: float
    num_calls: int
    round: int  # every load has its turn once in a round


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """The best rate that was seen, per second; `spread` is the best round's best over the median round's best."""

    rate: float
    spread: float


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The samples for one device, dtype and number of threads; without any, `message` says why."""

    device: str
    dtype: str
    num_threads: int
    samples: tuple[CeilingSample, ...] = ()
    crowding: float = 0.0  # the load average over the number of cores when they were taken
    message: str = ""

    @property
    def key(self) -> Place:
        """What workloads must match."""
        return self.device, self.dtype, self.num_threads

    @property
    def matmul(self) -> Ceiling | None:
        """FLOP/s of the fastest matrix product that keeps what the dtype holds, whatever its size."""
        return _best(sample for sample in self.samples if sample.kind == MATMUL)

    def copy(self, num_bytes: float, *, is_cold: bool = False) -> Ceiling | None:
        """Bytes/s of the fastest copy that touches at least `num_bytes`, so that no smaller cache helped it.

        With `is_cold` or beyond the largest copy: of the largest, which no cache holds. With 0 bytes: of any.
        """
        copies = [sample for sample in self.samples if sample.kind == COPY]
        largest = max((sample.amount for sample in copies), default=0)
        least = largest if is_cold else min(largest, num_bytes)
        return _best(sample for sample in copies if sample.amount >= least)


def _best(samples: Iterable[CeilingSample]) -> Ceiling | None:
    """The best of all rounds; None without any sample."""
    rounds: dict[int, float] = {}
    for sample in samples:
        rounds[sample.round] = max(rounds.get(sample.round, 0.0), sample.amount / sample.value)
    if not rounds:
        return None
    best = max(rounds.values())
    return Ceiling(rate=best, spread=best / median(rounds.values()))
