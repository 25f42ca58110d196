"""Hooks and fixtures for all tests."""

import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import coverage
import pytest
import torch

from attnbench import cli
from attnbench.analysis import comparisons
from attnbench.commands import OUTPUT
from tests import forks
from tests.closest import closest_call
from tests.places import ORDER

__all__ = ["closest_call"]
"""The fixture of tests/closest.py, which applies to all tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of documents first, since they take longest, and mark cases of tests with `one_in` as long tests.

    With a seed in the variable ORDER, shuffle the files and the tests of each file.
    """
    items.sort(key=lambda item: item.path.name != "test_documents.py")
    cases: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker(pytest.mark.long)
            cases[test] += 1
    if seed := os.environ.get(ORDER):
        draws = random.Random(seed)
        files = dict.fromkeys(item.path for item in items)  # the tests of a file stay together, because of its fixtures
        order = {path: draws.random() for path in files}
        items.sort(key=lambda item: (order[item.path], draws.random()))


def pytest_collection_finish() -> None:
    """Exclude the present objects from garbage collections, since each visit of a run collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_worker():
    """Hide the variable of pytest-xdist: with it, pytest-benchmark measures nothing in processes that tests start."""
    os.environ.pop("PYTEST_XDIST_WORKER", None)


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory):
    """Keep the tests' caches apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread unless OMP_NUM_THREADS is set: on small tensors a second one waits, or competes with tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_verbosity() -> Iterator[None]:
    """Restore the verbosity that a command in this process sets."""
    yield
    OUTPUT.is_json = OUTPUT.is_quiet = OUTPUT.is_verbose = False


@pytest.fixture(autouse=True)
def quiet_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the load by other tests, which would make runs doubtful; tests of such doubts set their own limit."""
    monkeypatch.setattr(comparisons, "MOST_WAITING", 1.0)


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Use workers that start at once (tests/forks.py), for runs that do not test the start of workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forks.python())
        yield


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Call the command in this process; return its output and its exit code."""

    def call(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr("sys.argv", ["attnbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code or 0, stdout=printed.out, stderr=printed.err)

    return call


@pytest.fixture
def interruptible() -> Iterator[None]:
    """React to SIGINT, here and in processes that a test starts, since a background job of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def many_visits() -> Iterator[None]:
    """Turn off line coverage for whole runs on simulated machines, where counting lines takes longer than the run."""
    counting = coverage.Coverage.current()
    if counting is not None:
        counting.stop()
    yield
    if counting is not None:
        counting.start()
