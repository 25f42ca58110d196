"""A judge and a runner in one process, so that a test can look into both; the oracle's answers are shared."""

from functools import lru_cache

from attnbench import plugins
from attnbench.checking.agreement import References, ask_oracle
from attnbench.contract import Implementation
from attnbench.contract.loading import named
from attnbench.processes.messages import Check, Heartbeat, Reply
from attnbench.processes.worker.answers import Worker
from attnbench.workloads.workload import Workload


@lru_cache(maxsize=128)
def references(point: Workload, seed: int = 0, *, is_brief: bool = False) -> References:
    """The oracle's answers at a workload, computed once for all tests of a process."""
    return ask_oracle(point, seed, is_brief=is_brief)


def checked(request: Check, runner: Worker | None = None, judge: Worker | None = None) -> Reply:
    """Judge a cell of an implementation in `runner`, by default a fresh one; `judge` asks a runner of its own."""
    judge = judge or Worker(Heartbeat(), (runner or Worker(Heartbeat())).answer)
    return judge.answer(request)


def bundled() -> dict[str, Implementation]:
    return {name: named(name) for name in plugins.stems(plugins.PACKAGE)}


def portable() -> list[str]:
    """The names of those that run on any machine without compiling."""
    point = Workload(scope="module", seq_len=4, mask="causal")
    return [name for name, each in bundled().items() if not each.compiles and each.unsupported(point) is None]
