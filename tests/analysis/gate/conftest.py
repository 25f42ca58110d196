"""The run with which the tests of the gate compare other runs."""

import pytest

from attnbench.analysis.results import Results
from tests.analysis.gate.scripts import run


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(tmp_path_factory.mktemp("base") / "run")
