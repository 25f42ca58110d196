"""The pytest fixture `attention_bench`, which checks and times attention inside your own test suite.

    def test_mine_is_no_slower(attention_bench):
        found = attention_bench(my_attention, "sdpa", seq_len=512, mask="causal")
        assert found.verdict != "slower"

Pytest loads it automatically if attnbench is installed; heavy imports wait until a test uses the fixture.
"""

import itertools
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from attnbench.analysis.results import Results
    from attnbench.api import Outcome
    from attnbench.contract import Implementation
    from attnbench.storage.events import Event, Plan
    from attnbench.storage.records import Agreement, Counters
    from attnbench.workloads.workload import Workload

Given = str | Callable[..., Any] | type
"""A name, a path/to/file.py:Name, a function of query, key, value and mask, or a class: see docs/adapters.md."""
MOST_SEEDS = 2**31
HINT = 'isolation="process" times both in several processes, and so decides less than 3 %.'


class AttentionBench:
    """Check a candidate and time it against a baseline, in randomised blocks."""

    def __init__(self, seed: int) -> None:
        """Keep the seed of the inputs and of all orders."""
        self.seed = seed

    def __call__(  # noqa: PLR0913 - all but the first two have useful defaults
        self,
        candidate: Given,
        baseline: Given = "sdpa",
        *,
        budget_s: float = 5.0,
        smallest_effect: float = 0.02,
        false_share: float = 0.001,
        seed: int | None = None,
        isolation: Literal["shared", "process"] = "shared",
        **axes: Any,  # noqa: ANN401 - one value of an axis, or several
    ) -> "Outcome":
        """Compare both, and return the outcome of `attnbench.compare`: ratio, interval, verdict and more.

        `axes` are those of a workload, such as seq_len, num_heads, dtype, mask and direction (default: inference), each
        a value or a list of values. The comparison ends when the verdict is settled, or `budget_s`, shared by all
        workloads, is spent. At most one of a thousand verdicts faster or slower is false (`false_share`), since a suite
        may have hundreds. `seed` defaults to the session's.

        `isolation="shared"` times both in this process, which decides nothing below 3 %: two processes that run the
        same code differ by that much. With "process" at least four fresh processes time them, as in `attnbench
        compare`.

        Raises:
            AssertionError: the answers of either disagree with the float64 oracle; the message is the diagnosis.
            ValueError: there is no such axis or implementation, or it does not support the workload.
        """
        from attnbench import devices
        from attnbench.analysis.comparisons import comparisons
        from attnbench.api import outcome
        from attnbench.processes.stages import now
        from attnbench.statistics.verdict import Reason
        from attnbench.storage import events
        from attnbench.workloads import sweep

        start_s, seed = time.monotonic(), self.seed if seed is None else seed
        every = {"direction": "inference", **axes}
        if isolation == "process":
            asked = {"budget": budget_s, "smallest_effect": smallest_effect, "false_share": false_share, "seed": seed}
            return _compared_in_processes(candidate, baseline, **asked, **every)
        lists = [value if isinstance(value, list | tuple | range) else [value] for value in every.values()]
        workloads = [sweep.make(dict(zip(every, values, strict=True))) for values in itertools.product(*lists)]
        contenders = _contenders(candidate, baseline)
        reference, _ = contenders
        plan = events.Plan(
            sweep="pytest",
            workloads=tuple(workloads),
            implementations=tuple(contenders),
            baseline=reference,
            metrics=("latency",),
            budget_s=budget_s,
            call_limit_s=0.0,
            timeout_s=0.0,
            memory_limit_bytes=0,
            smallest_effect=smallest_effect,
            false_share=false_share,
            seed=seed,
        )
        before = devices.read_counters()
        taken = [event for workload in workloads for event in _measured(workload, contenders, plan)]
        elapsed_s = time.monotonic() - start_s
        finished = events.RunFinished(time=now(), elapsed_s=elapsed_s, counters=devices.read_counters())
        results = _stored(plan, before, [*taken, finished])
        is_open = any(each.reason == Reason.one_process for each in comparisons(results))
        return outcome(results, HINT if is_open else "")


def _compared_in_processes(candidate: Given, baseline: Given, **asked: Any) -> "Outcome":  # noqa: ANN401 - as compare has them
    """Compare in fresh processes; nothing stays on disk.

    Raises:
        AssertionError: the answers of either are wrong.
        ValueError: one does not support a workload.
    """
    from attnbench.api import compare
    from attnbench.storage.records import Status

    _contenders(candidate, baseline)
    with tempfile.TemporaryDirectory(prefix="attnbench-pytest-") as folder:
        found = compare(candidate, baseline=baseline, results=folder, **asked)
    for record in found.results.records:
        if record.is_wrong:
            where = f"{record.workload.id} (seed {found.results.plan.seed})"
            raise AssertionError(f"{record.implementation} is wrong on {where}: {record.message}")
        if record.status is Status.unsupported:
            raise ValueError(f"{record.implementation} does not support {record.workload.id}: {record.message}")
    return found


def _measured(workload: "Workload", contenders: Mapping[str, Given], plan: "Plan") -> "Iterator[Event]":
    """Check and compare both, and yield the events of a run."""
    import msgspec
    import torch

    from attnbench.devices import device
    from attnbench.processes.worker.answers import Bench
    from attnbench.storage import events
    from attnbench.storage.records import Arm, Status
    from attnbench.timing.functions import FunctionComparison

    before = torch.get_num_threads()
    torch.set_num_threads(workload.num_threads or before)
    try:
        bench, calls = Bench(workload), {}
        for name, given in contenders.items():
            arm, (checked, agreed) = Arm(implementation=name), _checked(given, name, workload, plan.seed)
            yield events.CellChecked(workload=workload.id, implementation=name, status=Status.ok, agreement=agreed)
            calls[name] = bench.timed(arm, checked).call
        with torch.set_grad_enabled(workload.direction != "inference"):
            here = device(workload.device)
            compared = FunctionComparison(
                calls,
                plan.baseline,
                smallest_effect=plan.smallest_effect,
                false_share=plan.false_share,
                clock=here.clock,
                seed=plan.seed,
                gauge_work=here.interference_probe(torch.get_num_threads()),
            )
            compared.run(plan.budget_s / len(plan.workloads))
        for name in calls:
            if wrong := bench.verify(Arm(implementation=name)):
                raise AssertionError(f"{name} was right before it was timed, and no longer is: {wrong}")
    finally:
        torch.set_num_threads(before)
    for visit in compared.visits:
        yield msgspec.structs.replace(visit, workload=workload.id)


def _stored(plan: "Plan", before: "Counters", taken: "Sequence[Event]") -> "Results":
    """Read a run that consists of these events; its folder is removed afterwards."""
    from attnbench.analysis.results import read
    from attnbench.devices import environment
    from attnbench.processes.sides import current_commit
    from attnbench.processes.stages import now
    from attnbench.storage import events
    from attnbench.storage.journal import Journal

    with tempfile.TemporaryDirectory(prefix="attnbench-pytest-") as name:
        with Journal(Path(name)) as journal:
            commit = current_commit()
            journal.append(events.RunStarted(schema=events.SCHEMA, run="pytest", time=now(), commit=commit, plan=plan))
            here = environment.collect()
            journal.append(events.WorkerStarted(time=now(), environment=here, counters=before))
            for event in taken:
                journal.append(event)
        return read(Path(name))


def _contenders(candidate: Given, baseline: Given) -> dict[str, Given]:
    """Both by name, the baseline first; if the names are equal, the candidate is renamed.

    Raises:
        ValueError: both are the same.
    """
    from attnbench.api import CANDIDATE
    from attnbench.plugins import name_of

    reference, mine = (
        name_of(given) if isinstance(given, str) else getattr(given, "__name__", default)
        for given, default in ((baseline, "baseline"), (candidate, "mine"))
    )
    if candidate == baseline:
        raise ValueError(f"{reference} would be compared with itself: give two different ones")
    return {reference: baseline, mine if mine != reference else f"{mine}{CANDIDATE}": candidate}


def _checked(given: Given, name: str, workload: "Workload", seed: int) -> "tuple[Implementation, Agreement]":
    from attnbench.checking import agreement
    from attnbench.checking.case import reason_against
    from attnbench.contract import loading
    from attnbench.storage.records import Grade

    made = loading.implementation(given) if isinstance(given, str) else loading.from_value(given, name)
    if reason := reason_against(made, workload):
        raise ValueError(f"{name} does not support {workload.id}: {reason}")
    if made.is_approximate:
        raise ValueError(f"{name} is approximate: it is neither judged nor timed")
    agreed = agreement.check(agreement.ask_oracle(workload, seed), made)
    if agreed.grade is Grade.wrong:
        raise AssertionError(f"{name} is wrong on {workload.id} (seed {seed}): {agreed.diagnosis}")
    return made, agreed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the seed, and options for the suite pytest_suite: a selection as of `attnbench run`."""
    group = parser.getgroup("attnbench")
    told = "Seed of the inputs that are checked, and of all orders. Default: drawn for each session."
    group.addoption("--attnbench-seed", type=int, default=None, metavar="N", help=told)
    parser.addini("attnbench_seed", f"{told} --attnbench-seed goes before it.", default="")
    group.addoption("--attnbench-sweep", metavar="NAME|FILE", help="A sweep by name, or a TOML file. Default: quick.")
    group.addoption(
        "--attnbench-set", action="append", default=[], metavar="AXIS=V,V", help="As --set of attnbench run."
    )
    group.addoption("--attnbench-implementation", action="append", default=[], metavar="NAME", help="Default: all.")
    group.addoption("--attnbench-budget", type=float, default=None, metavar="SECONDS", help="Wall time of the run.")
    group.addoption(
        "--attnbench-results", type=Path, default=Path("results"), metavar="DIR", help="Where runs are kept."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of the session unless one is set: known inputs prove less.

    Raises:
        UsageError: the seed is not a whole number of at least 0.
    """
    if config.option.attnbench_seed is None:
        config.option.attnbench_seed = config.getini("attnbench_seed") or secrets.randbelow(MOST_SEEDS)
    given = str(config.option.attnbench_seed)
    if not given.isdecimal():
        raise pytest.UsageError(f"attnbench_seed={given} is not allowed: give a whole number, 0 or more")
    config.option.attnbench_seed = int(given)


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Print the evidence of a verdict below a failing assertion."""
    for each in (left, right):
        if evidence := getattr(each, "evidence", ()) if isinstance(each, str) else ():
            return [f"{left!r} {op} {right!r}", *evidence]
    return None


@pytest.fixture
def attention_bench(request: pytest.FixtureRequest) -> AttentionBench:
    """Call it with a candidate, a baseline and the axes of a workload; see `AttentionBench`.

    A failing test reports the seed that reproduces it.
    """
    seed = request.config.getoption("--attnbench-seed")
    request.node.add_report_section("setup", "attnbench", f"The same inputs again: --attnbench-seed {seed}")
    return AttentionBench(seed)
