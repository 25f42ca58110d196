"""Which blocks to discard because other work disturbed them, as an interference probe in each block shows.

The probe is small fixed work of the harness, so that the rule is blind to what is compared. An outlier of one arm is
never cut, for it may be the arm's own: a whole block is discarded, or none of it. The rule looks only at probes up to
that block, so that a verdict that is watched while samples come in never changes its past.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from attnbench.statistics.intervals import Block, place_of
from attnbench.storage.fold import ProbeVisit
from attnbench.storage.records import Sample

WINDOW = 50
FEWEST = 8
"""Before this many probes nothing is known of the machine's usual state."""
LARGEST_CALM = math.log(1.25)
SPREADS = 6 * 1.4826
"""A probe is late when it is this many median absolute deviations above the median, and a quarter in any case."""
MANY = 0.25
"""A session that discards a larger share of its blocks was not measured on a quiet machine."""


class InterferenceGauge:
    """Judges probes in the order in which they were taken, each among those of its kind."""

    def __init__(self) -> None:
        """Begin with no probes."""
        self._kinds: defaultdict[str, _Probes] = defaultdict(_Probes)
        self.discarded: dict[str, set[Block]] = {}  # by workload
        self.num_blocks = 0
        self._num_followed = 0

    @property
    def num_discarded(self) -> int:
        """How many blocks are discarded."""
        return sum(map(len, self.discarded.values()))

    def follow(self, visits: Sequence[ProbeVisit]) -> dict[str, set[Block]]:
        """Add the visits that are new since the last call; returns the discarded blocks of each workload."""
        for visit in visits[self._num_followed :]:
            self.add(*visit)
        self._num_followed = len(visits)
        return self.discarded

    def add(self, workload: str, probes: Iterable[Sample], kind: str = "") -> None:
        """Add the probes of one visit, and discard each block whose probe took far longer than those before.

        `kind` names the probe: another device or number of threads takes another time.
        """
        known = self._kinds[kind]
        for sample in probes:
            self.num_blocks += 1
            if known.is_late(sample):
                self.discarded.setdefault(workload, set()).add(place_of(sample))


class _Probes:
    """The latest probes of one kind.

    Those of the same process count, and as long as these are few, those of earlier ones, too: a process of a comparison
    of few cells makes four blocks.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque()  # of this process
        self._before: deque[float] = deque(maxlen=WINDOW)  # of all earlier ones
        self._ordered: list[float] = []  # those of this process by size
        self._epoch = -1

    def is_late(self, sample: Sample) -> bool:
        """Whether the next probe is late, which then is one of the known ones."""
        recent, ordered = self._recent, self._ordered
        if sample.epoch != self._epoch:
            self._before.extend(recent)
            recent.clear()
            ordered.clear()
            self._epoch = sample.epoch
        log, number = math.log(sample.value), len(ordered)
        known = ordered if number >= FEWEST else sorted([*self._before, *ordered])
        # Most are below the bound that no spread can change, and are spared the rest.
        is_beyond = len(known) >= FEWEST and log - known[(len(known) - 1) // 2] > LARGEST_CALM
        is_late = is_beyond and _is_late(log, known)
        recent.append(log)
        insort(ordered, log)
        if number >= WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        return is_late


def _is_late(log: float, known: list[float]) -> bool:
    """Whether a probe took far longer than those that are known, in the order of size."""
    beyond = log - _middle(known)
    if beyond <= LARGEST_CALM:
        return False
    apart = sorted(abs(each - (log - beyond)) for each in known)
    return beyond > SPREADS * _middle(apart)


def _middle(ordered: list[float]) -> float:
    """The median of what is in the order of size."""
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
