"""Time the first calls of a cell in fresh processes, with empty compile caches and with filled ones."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from attnbench.processes.messages import Failed, FirstCalls
from attnbench.processes.worker_client import COMPILERS
from attnbench.storage.records import FIRST_CACHED, FIRST_CALL, FIRST_OTHERS, Measurement, Sample

NUM_READINGS, SLOW_S = 3, 5.0
"""First calls are timed NUM_READINGS times, but not again after one has taken more than SLOW_S seconds."""
BUDGET_SHARE = 1 / 3
"""Share of a run's budget for first calls; cells for which no time is left get no metrics of first calls."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Environment variables that each name the folder of a compile cache."""


class Read(Protocol):
    """A function that times first calls in a fresh process."""

    def __call__(self, settings: dict[str, str], *, has_others: bool) -> FirstCalls | Failed:
        """Time first calls under these environment variables; a value of "" unsets one.

        If `has_others` is set, the first calls at another length, batch and dtype are timed, too.
        """


def measurements(read: Read) -> Iterator[Measurement]:
    """Yield the measurements of a cell's first calls, in seconds, FIRST_CALL last; yield none if a reading failed.

    For these calls, torch.compile uses its default number of compiling processes, unless the user has set one. Workers
    that take samples use a single compiling process.
    """
    cold, warm = list[FirstCalls](), list[FirstCalls]()
    usual = {} if COMPILERS in os.environ else {COMPILERS: ""}
    while len(cold) < NUM_READINGS and max((each.first_s for each in cold), default=0.0) <= SLOW_S:
        with TemporaryDirectory(prefix="attnbench-", ignore_cleanup_errors=True) as folder:
            settings = {name: str(Path(folder) / name.lower()) for name in CACHES} | usual
            for readings in (cold, warm):
                reading = read(settings, has_others=readings is cold)
                if isinstance(reading, Failed):
                    return
                readings.append(reading)
                if not any(Path(folder).iterdir()):  # nothing was cached
                    break
    yield from _measurement(FIRST_CACHED, (each.first_s for each in warm))
    for metric in FIRST_OTHERS:
        yield from _measurement(metric, (each.others_s.get(metric) for each in cold))
    yield from _measurement(FIRST_CALL, (each.first_s for each in cold))


def _measurement(metric: str, seconds: Iterable[float | None]) -> Iterator[Measurement]:
    samples = tuple(Sample(value=value) for value in seconds if value is not None)
    if samples:
        yield Measurement(metric=metric, unit="s", samples=samples)
