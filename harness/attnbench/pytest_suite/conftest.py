"""The cells of the suite, its run, and a clock that plays the samples of a cell again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from attnbench.plugins import name_of
from attnbench.workloads.workload import Workload

if TYPE_CHECKING:
    from attnbench.analysis.results import Results
    from attnbench.storage.events import Plan


@dataclass(frozen=True)
class Cell:
    """A workload and the implementation that a test is about."""

    workload: Workload
    spec: str

    def __str__(self) -> str:
        """The text between the brackets of the test's name."""
        return f"{name_of(self.spec)}-{self.workload.id}"


class ReplayClock:
    """A timer whose time passes only when a sample is played: pytest-benchmark then finds the sample's value."""

    def __init__(self) -> None:
        """Nothing to play yet."""
        self._now_s = 0.0
        self._samples: Iterator[float] = iter(())

    def load(self, samples: Sequence[float]) -> None:
        """Seconds per call, to be played in this order."""
        self._samples = iter(samples)

    def play(self) -> None:
        """Let as much time pass as the next sample took; none after the last."""
        self._now_s += next(self._samples, 0.0)

    def __call__(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s


def _plan(config: pytest.Config) -> "Plan":
    from attnbench.processes.planning import build_plan

    return build_plan(
        sweep=config.getoption("--attnbench-sweep") or "quick",
        is_exact=config.getoption("--attnbench-sweep") is None,
        settings=config.getoption("--attnbench-set"),
        implementations=config.getoption("--attnbench-implementation"),
        budget_s=config.getoption("--attnbench-budget"),
        seed=config.getoption("--attnbench-seed"),
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
def measured(request: pytest.FixtureRequest) -> "Results":
    """The run over the cells whose tests were chosen, and the baseline on their workloads; its reports are written."""
    from attnbench.analysis.results import read
    from attnbench.commands.running import watching, write_reports
    from attnbench.processes.execution import execute, new_folder

    planned, cells = _plan(request.config), chosen(request.session.items)
    specs = {cell.spec for cell in cells}
    asked = msgspec.structs.replace(
        planned,
        workloads=tuple(dict.fromkeys(cell.workload for cell in cells)),
        implementations=tuple(s for s in planned.implementations if s in specs or name_of(s) == planned.baseline),
    )
    folder = new_folder(request.config.getoption("--attnbench-results"), f"{planned.sweep}-pytest")
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        with watching() as watch:
            execute(asked, folder, watch)
        results = read(folder)
        write_reports(results, folder)
    return results


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """A host's name identifies people, not machines."""
    machine_info.pop("node", None)
