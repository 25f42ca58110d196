"""What all tests share."""

import os

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def no_worker():
    """What tests start is no part of this session: pytest-benchmark would measure nothing where it sees a worker."""
    os.environ.pop("PYTEST_XDIST_WORKER", None)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """On small tensors a second thread waits more than it works, and far more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
