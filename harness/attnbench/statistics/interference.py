"""Discard blocks that other work on the machine disturbed, according to the interference probe of each block.

The probe is a small fixed computation of attnbench in each block, so discarding does not depend on the times of the
compared arms (implementations). A slow sample of one arm is never removed alone, since it may be typical of this arm: a
block is discarded as a whole, or not at all. Only the probes up to a block decide on it, so later samples never change
an earlier decision.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from statistics import median

from attnbench.statistics.intervals import NORMAL_MAD, Block, place_of
from attnbench.storage.fold import ProbeVisit
from attnbench.storage.records import Sample

WINDOW = 50  # number of latest probes that are kept: of the current process, and of all earlier processes together
FEWEST = 8  # fewest earlier probes from which a probe is judged; without them it counts as undisturbed
LARGEST_CALM = math.log(1.25)
SPREADS = 6 * NORMAL_MAD
"""A probe is late if the log of its time exceeds the median by more than this many median absolute deviations and by
more than LARGEST_CALM."""
MANY = 0.25  # a session that discards a larger share of its blocks ran on a busy machine


class InterferenceGauge:
    """A detector of disturbed blocks: it compares each interference probe with earlier probes of the same kind."""

    def __init__(self) -> None:
        self._kinds: defaultdict[str, _Probes] = defaultdict(_Probes)
        self.discarded: dict[str, set[Block]] = {}  # by workload
        self.num_blocks = 0
        self._num_followed = 0

    def follow(self, visits: Sequence[ProbeVisit]) -> dict[str, set[Block]]:
        """Add the visits that are new since the last call; return all discarded blocks by workload.

        `visits` has all visits so far. A visit has the probes of a short series of blocks.
        """
        for visit in visits[self._num_followed :]:
            self.add(*visit)
        self._num_followed = len(visits)
        return self.discarded

    def add(self, workload: str, probes: Iterable[Sample], kind: str = "") -> None:
        """Add the probes of one visit; discard each block whose probe took much longer than the probes before it.

        `kind` separates probes on different devices or with different numbers of threads, because their times differ.
        """
        known = self._kinds[kind]
        for sample in probes:
            self.num_blocks += 1
            if known.is_late(sample):
                self.discarded.setdefault(workload, set()).add(place_of(sample))


class _Probes:
    """The latest probes of one kind, as logarithms of their times.

    A probe is compared with earlier probes of its own process. If there are fewer than FEWEST, the probes of earlier
    processes are used, too, because a process measures only four blocks if few implementations are compared.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque()  # probes of the current process, in time order
        self._before: deque[float] = deque(maxlen=WINDOW)  # probes of earlier processes
        self._ordered: list[float] = []  # the values of _recent, sorted
        self._epoch = -1

    def is_late(self, sample: Sample) -> bool:
        """Add the next probe; return whether it took much longer than the probes before it."""
        recent, ordered = self._recent, self._ordered
        if sample.epoch != self._epoch:
            self._before.extend(recent)
            recent.clear()
            ordered.clear()
            self._epoch = sample.epoch
        log, number = math.log(sample.value), len(ordered)
        known = ordered if number >= FEWEST else [*self._before, *ordered]
        middle = median(known) if len(known) >= FEWEST else math.inf
        is_late = log - middle > LARGEST_CALM and log - middle > SPREADS * median(abs(each - middle) for each in known)
        recent.append(log)
        insort(ordered, log)
        if number >= WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        return is_late
