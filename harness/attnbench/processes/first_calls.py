"""Time the first calls of a cell in fresh processes, with empty compile caches and with filled ones."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from attnbench.processes.messages import Failed, FirstCalls
from attnbench.processes.worker_client import COMPILERS
from attnbench.storage.records import FIRST_CACHED, FIRST_CALL, FIRST_LONGER, Measurement, Sample

NUM_READINGS, SLOW_S = 3, 5.0
"""A first call is read NUM_READINGS times, or until a reading takes more than SLOW_S seconds."""
BUDGET_SHARE = 1 / 3
"""Share of a run's budget for first calls; cells for which no time is left have no such metrics."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Environment variables that each name the folder of a compile cache."""
Read = Callable[[dict[str, str]], FirstCalls | Failed]
"""A function that times first calls in a fresh process with these environment variables; "" unsets one."""


def measurements(read: Read) -> Iterator[Measurement]:
    """The measurements of a cell's first calls in seconds, FIRST_CALL last; none if a reading failed.

    Here torch.compile uses as many processes as by default; in workers that take samples it uses one.
    """
    cold, warm = list[FirstCalls](), list[FirstCalls]()
    usual = {} if COMPILERS in os.environ else {COMPILERS: ""}
    while len(cold) < NUM_READINGS and max((each.first_s for each in cold), default=0.0) <= SLOW_S:
        with TemporaryDirectory(prefix="attnbench-", ignore_cleanup_errors=True) as folder:
            settings = {name: str(Path(folder) / name.lower()) for name in CACHES} | usual
            for readings in (cold, warm):
                reading = read(settings)
                if isinstance(reading, Failed):
                    return
                readings.append(reading)
                if not any(Path(folder).iterdir()):  # nothing was cached
                    break
    yield from _measurement(FIRST_CACHED, (each.first_s for each in warm))
    yield from _measurement(FIRST_LONGER, (each.longer_s for each in cold))
    yield from _measurement(FIRST_CALL, (each.first_s for each in cold))


def _measurement(metric: str, seconds: Iterable[float | None]) -> Iterator[Measurement]:
    samples = tuple(Sample(value=value) for value in seconds if value is not None)
    if samples:
        yield Measurement(metric=metric, unit="s", samples=samples)
