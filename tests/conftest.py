"""What all tests share."""

import gc
import os
import sys
from collections.abc import Iterator

import coverage
import pytest
import torch

from attnbench.analysis import comparisons
from attnbench.commands import VERBOSITY
from tests import forks
from tests.apart import pytest_configure, pytest_runtest_protocol
from tests.closest import closest_call

__all__ = ["closest_call", "pytest_configure", "pytest_runtest_protocol"]
"""Hooks: tests marked `cuda` run in a process of their own each; each test's closest call is noted where asked for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The documents first: a single one takes minutes, and whoever works on it should not begin last."""
    items.sort(key=lambda item: item.path.name != "test_documents.py")


def pytest_collection_finish() -> None:
    """Leave what is there now out of garbage collections: each visit of a run, real or simulated, makes one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_worker():
    """What tests start is no part of this session: pytest-benchmark would measure nothing where it sees a worker."""
    os.environ.pop("PYTEST_XDIST_WORKER", None)


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory):
    """Nothing that tests keep lies among what the user keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """On small tensors a second thread waits more than it works, and far more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_verbosity() -> Iterator[None]:
    """A command that is called in this process leaves no --quiet or --verbose to the next test."""
    yield
    VERBOSITY.is_quiet = VERBOSITY.is_verbose = False


@pytest.fixture(autouse=True)
def quiet_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests keep the processors busy themselves: no run is doubtful for that, but where it is what is tested."""
    monkeypatch.setattr(comparisons, "MOST_WAITING", 1.0)


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Workers that start at once, for runs in which their start is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forks.python())
        yield


@pytest.fixture
def many_visits() -> Iterator[None]:
    """For whole runs on simulated machines: it would take longer to count the engine's lines than to run them."""
    counting = coverage.Coverage.current()
    if counting is not None:
        counting.stop()
    yield
    if counting is not None:
        counting.start()
