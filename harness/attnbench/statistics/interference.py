"""Which blocks somebody else disturbed: told by a canary, small fixed work in each block, blind to what is compared.

An outlier of one arm is never cut, for it may be the arm's own: a whole block is void, or none of it. The rule looks
only at canaries up to that block, so that a verdict that is watched while samples come in never changes its past.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from attnbench.statistics.intervals import Block, median
from attnbench.storage.records import Sample

CANARY = "(canary)"
"""The arm's name; no implementation's begins with a bracket."""
WINDOW = 50
FEWEST = 8
"""Before this many canaries nothing is known of the machine's mood."""
LARGEST_CALM = math.log(1.25)
SPREADS = 6 * 1.4826
"""A canary is late when it is this many median absolute deviations above the median, and a quarter in any case."""
MANY = 0.25
"""A session with a larger share of void blocks than this was not measured on a quiet machine."""


class Gauge:
    """Listens to canaries in the order in which they were taken."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._recent: deque[float] = deque(maxlen=WINDOW)  # of this process
        self._before: deque[float] = deque(maxlen=WINDOW)  # of all earlier ones
        self._epoch = -1
        self.void: dict[str, set[Block]] = {}  # by workload
        self.num_blocks = 0

    @property
    def num_void(self) -> int:
        """How many blocks are void."""
        return sum(map(len, self.void.values()))

    def hear(self, workload: str, canaries: Iterable[Sample]) -> None:
        """Canaries of one visit: each block whose canary took far longer than those before is void.

        Those of its own process count, and as long as these are few, those of earlier ones, too: a process of a
        comparison of few cells makes four blocks.
        """
        for sample in canaries:
            if sample.epoch != self._epoch:
                self._before.extend(self._recent)
                self._recent.clear()
                self._epoch = sample.epoch
            self.num_blocks += 1
            log = math.log(sample.value)
            if self._is_late(log):
                self.void.setdefault(workload, set()).add((sample.epoch, sample.visit, sample.block))
            self._recent.append(log)

    def _is_late(self, log: float) -> bool:
        known = self._recent if len(self._recent) >= FEWEST else [*self._before, *self._recent]
        if len(known) < FEWEST:
            return False
        usual = median(known)
        spread = median(abs(each - usual) for each in known)
        return log - usual > max(LARGEST_CALM, SPREADS * spread)


def canary() -> Callable[[], object]:
    """The fixed work on the processor: a small matrix product and a copy that leaves the first caches.

    It runs in this thread alone: numpy's `@` wakes those of its BLAS, which then spin for a tenth of a second on the
    cores of whoever comes next in the block.
    """
    draws = np.random.default_rng(0)
    matrix = draws.standard_normal((64, 64), dtype=np.float32)
    product = np.empty_like(matrix)
    source = draws.standard_normal(2**17, dtype=np.float32)  # 512 KiB
    target = np.empty_like(source)

    def work() -> None:
        np.einsum("ij,jk->ik", matrix, matrix, out=product)  # numpy's own loops
        np.copyto(target, source)

    return work
