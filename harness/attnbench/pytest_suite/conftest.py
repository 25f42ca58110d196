"""Cells and the run of the suite."""

from collections.abc import Sequence
from typing import Any

import pytest

from attnbench.pytest_suite.replay import Cell, Measured


def _plan(config: pytest.Config) -> Any:  # noqa: ANN401 - attnbench.storage.events.Plan, imported late
    from attnbench.processes.planning import Selection, plan

    return plan(
        Selection(
            sweep=config.getoption("--attnbench-sweep"),
            settings=config.getoption("--attnbench-set"),
            implementations=config.getoption("--attnbench-implementation"),
            budget_s=config.getoption("--attnbench-budget"),
        )
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each cell of the plan."""
    if "cell" in metafunc.fixturenames:
        try:
            planned = _plan(metafunc.config)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        cells = [Cell(workload, spec) for workload in planned.workloads for spec in planned.implementations]
        metafunc.parametrize("cell", cells, ids=[str(cell) for cell in cells])


def chosen(items: Sequence[Any]) -> list[Cell]:
    """The cells of our own tests: others next to them have other parameters, or a `cell` that is something else."""
    parameters = (item.callspec.params for item in items if hasattr(item, "callspec"))
    return [each["cell"] for each in parameters if isinstance(each.get("cell"), Cell)]


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Measured:
    """The run over the cells whose tests were chosen."""
    cells = chosen(request.session.items)
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        return Measured(_plan(request.config), cells, request.config.getoption("--attnbench-results"))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """A host's name identifies people, not machines."""
    machine_info.pop("node", None)
