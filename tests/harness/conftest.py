"""What tests of the harness share."""

import gc
from collections.abc import Iterator

import coverage
import pytest


@pytest.fixture
def many_visits() -> Iterator[None]:
    """For whole runs on simulated machines, which take many thousands of visits beside all that pytest keeps.

    Each visit collects garbage, and it would take longer to count the engine's lines than to run them: other tests'
    are counted.
    """
    counting = coverage.Coverage.current()
    if counting is not None:
        counting.stop()
    gc.freeze()
    yield
    gc.unfreeze()
    if counting is not None:
        counting.start()
