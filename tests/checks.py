"""A judge and a runner in one process, so that a test can look into both; tests share the oracle's answers."""

from functools import lru_cache
from typing import Any

from attnbench import plugins
from attnbench.checking.reference import References
from attnbench.contract import Implementation
from attnbench.contract.loading import named
from attnbench.processes.messages import Failed, Heartbeat, Target
from attnbench.processes.worker.answers import Worker
from attnbench.storage.events import CellChecked
from attnbench.storage.records import REPEATABLE, Agreement, Arm
from attnbench.workloads.workload import Workload


@lru_cache(maxsize=128)
def references(point: Workload, seed: int = 0, *, is_brief: bool = False) -> References:
    """Compute the oracle's answers at a workload, once for all tests of a process."""
    return References(point, seed, is_brief=is_brief)


LIMIT_S = 5.0


def cell_of(spec: str, workload: Workload, name: str = "f") -> Target:
    return Target(workload=workload, arm=Arm(implementation=name), spec=spec)


def judge_of(runner: Worker) -> Worker:
    return Worker(Heartbeat(), lambda function, _, **arguments: runner.answer(function, **arguments))


def checked(
    cell: Target, runner: Worker | None = None, judge: Worker | None = None, **options: Any
) -> CellChecked | Failed:
    """Check a cell in `runner`, by default a new one; a given `judge` uses its own runner instead."""
    judge = judge or judge_of(runner or Worker(Heartbeat()))
    reply: CellChecked | Failed = judge.answer("check", cell=cell, limit_s=LIMIT_S, seed=0, **options)
    return reply


def facts(agreement: Agreement) -> dict[str, object]:
    """Return the facts of an agreement without digits and equality of bits, which depend on addresses in memory."""
    rules = [each for each in agreement.rules if each.rule != REPEATABLE]
    return {
        "tensors": [(probe, each.tensor, each.grade) for probe, each in agreement.tensors()],
        "rules": {each.rule: (each.holds, each.is_noted, each.convention) for each in rules},
        "mistakes": agreement.mistakes,
        "conventions": agreement.conventions,
        "step": agreement.step,
    }


def bundled() -> dict[str, Implementation]:
    return {name: named(name) for name in plugins.stems(plugins.PACKAGE)}


def portable() -> list[str]:
    """List the bundled implementations that run on any machine and do not compile."""
    point = Workload(scope="module", seq_len=4, mask="causal")
    return [name for name, each in bundled().items() if not each.compiles and each.unsupported(point) is None]
