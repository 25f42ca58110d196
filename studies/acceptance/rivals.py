"""Popular tools, each driven as its users do: A to its end, then B. One session of V7.

    python -m studies.acceptance.rivals base.py candidate.py 5 SEED

Both files define a function `mine`. The session prints a row in JSON for each statistic and rule of each tool,
including attnbench.

Each tool has half of the time for A and half for B, including calibration and warm-up; starting an interpreter,
importing torch and collecting tests are free. A rule decides "they differ" from the two lists of times alone, so that
it can be applied again with one list made slower (a slowdown with known truth).
"""

import contextlib
import importlib.util
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from studies.acceptance.outcome import Row

Times = Sequence[float]
Rule = Callable[[Times, Times], bool]

ALPHA = 0.05


class Measured(NamedTuple):
    """A tool's times of one call, and the cost of measuring them."""

    times: list[float]  # seconds per call, of rounds, blocks or values
    wall_s: float


Measure = Callable[[Callable[[], object], float], Measured]


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A tool: how it times one call within a budget, its statistics, and its users' rules for a difference."""

    name: str
    measure: Measure
    statistics: Mapping[str, Callable[[Times], float]]
    rules: Mapping[str, Rule]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A tool's times of A and B."""

    rival: Rival
    a: list[float]
    b: list[float]
    wall_s: float

    def logs(self, factor: float = 1.0) -> dict[str, float]:
        """Return log(B / A) by statistic, with every time of B multiplied by `factor`."""
        return {
            name: float(np.log(read(self.b) * factor / read(self.a))) for name, read in self.rival.statistics.items()
        }

    def alarms(self, factor: float = 1.0) -> dict[str, bool]:
        """Return each rule's decision that A and B differ, with every time of B multiplied by `factor`."""
        b = [factor * value for value in self.b]
        return {name: bool(rule(self.a, b)) for name, rule in self.rival.rules.items()}


def compare(rival: Rival, a: Callable[[], object], b: Callable[[], object], budget_s: float) -> Timed:
    """Time A to its end, then B, each in half of the budget."""
    first, second = rival.measure(a, budget_s / 2), rival.measure(b, budget_s / 2)
    return Timed(rival=rival, a=first.times, b=second.times, wall_s=first.wall_s + second.wall_s)


def _mean(times: Times) -> float:
    return float(np.mean(times))


def _median(times: Times) -> float:
    return float(np.median(times))


def _min(times: Times) -> float:
    return float(np.min(times))


def _mann_whitney(a: Times, b: Times) -> bool:
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(a, b).pvalue) < ALPHA


def _welch(a: Times, b: Times) -> bool:
    from scipy.stats import ttest_ind

    return len(a) > 1 and len(b) > 1 and float(ttest_ind(a, b, equal_var=False).pvalue) < ALPHA


# ---- pytest-benchmark ----------------------------------------------------------------------------------------------

MOST_TURNS = 500
TEST_FILE = f"""
import time

import pytest


@pytest.mark.parametrize("turn", range({MOST_TURNS}))
def test_it(turn, request, carrier):
    if not carrier.has_time:
        pytest.skip("its time is spent")
    benchmark = request.getfixturevalue("benchmark")
    start = time.perf_counter()
    benchmark(carrier.call)
    carrier.keep(time.perf_counter() - start, benchmark.stats.stats.data)
"""


class _Carrier:
    """A pytest plug-in that passes the call in and the rounds out."""

    def __init__(self, call: Callable[[], object], share_s: float) -> None:
        self.call, self.share_s = call, share_s
        self.times: list[float] = []
        self.wall_s, self.longest_s = 0.0, 0.0

    @property
    def has_time(self) -> bool:
        """Whether another turn like the previous ones would fit into the budget; always true at first."""
        return not self.times or self.wall_s + self.longest_s < self.share_s

    def keep(self, turn_s: float, rounds: Times) -> None:
        """Record a turn: its duration and its rounds."""
        self.wall_s += turn_s
        self.longest_s = max(self.longest_s, turn_s)
        self.times += rounds

    @pytest.fixture(name="carrier")
    def itself(self) -> "_Carrier":
        """Return the carrier: the fixture of the test."""
        return self


def _pytest_benchmark(*options: str) -> Measure:
    """Run pytest in this process with its fixture on the call; calibration and statistics are pytest-benchmark's.

    `--benchmark-max-time` is the share of the budget (default: 1 s); other options keep their defaults: at least 5
    rounds, the collector on, no warm-up. The rounds are those of the fixture's `stats`, seconds per call. The plug-in
    sizes all rounds by the first call, which is the slowest, and so ends long before its time does. It is run again
    while there is time, as in a parametrised test, and the rounds are joined.
    Source: https://pytest-benchmark.readthedocs.io/en/latest/usage.html
    """

    def measure(call: Callable[[], object], share_s: float) -> Measured:
        carrier = _Carrier(call, share_s)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
            root = Path(folder)
            (root / "test_it.py").write_text(TEST_FILE, encoding="utf-8")
            (root / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
            given = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", str(root / "pytest.ini")]
            given += [
                f"--rootdir={root}",
                f"--benchmark-max-time={share_s}",
                f"--benchmark-storage={root}",
                *options,
            ]
            code = pytest.main([*given, str(root / "test_it.py")], plugins=[carrier])
        if code != 0 or not carrier.times:
            raise RuntimeError(f"pytest-benchmark ended with code {code}: {printed.getvalue()[-2000:]}")
        return Measured(carrier.times, carrier.wall_s)

    return measure


def _compare_fail(read: Callable[[Times], float], percent: float = 5.0) -> Rule:
    """`--benchmark-compare-fail=mean:5%`: fails if the later one takes over 5 % longer, in that direction alone.

    Source: https://pytest-benchmark.readthedocs.io/en/latest/comparing.html
    """
    return lambda a, b: read(b) / read(a) * 100 - 100 > percent


_PYTEST_STATISTICS = {"mean": _mean, "median": _median, "min": _min}
_PYTEST_RULES: dict[str, Rule] = {
    "compare-fail mean:5%": _compare_fail(_mean),
    "compare-fail min:5%": _compare_fail(_min),
    "Welch on rounds": _welch,
    "Mann-Whitney on rounds": _mann_whitney,
}

# ---- torch.utils.benchmark -----------------------------------------------------------------------------------------


def _torch_timer(call: Callable[[], object]) -> Any:  # noqa: ANN401 - torch's Timer
    """Create a Timer for the call with the current number of threads; its default is one."""
    import torch
    from torch.utils.benchmark import Timer

    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())


def _blocked(call: Callable[[], object], share_s: float) -> Measured:
    """Run blocked_autorange with min_run_time equal to its share; finding its block size comes on top.

    Source: https://docs.pytorch.org/docs/stable/benchmark_utils.html#torch.utils.benchmark.Timer.blocked_autorange
    """
    timer, start = _torch_timer(call), time.perf_counter()
    found = timer.blocked_autorange(min_run_time=share_s)
    return Measured(list(found.times), time.perf_counter() - start)


def _adaptive(call: Callable[[], object], share_s: float) -> Measured:
    """Run adaptive_autorange at its threshold of 0.1, but not before its share is spent, so that no time is lost.

    Source: https://docs.pytorch.org/docs/stable/benchmark_utils.html#torch.utils.benchmark.Timer.adaptive_autorange
    """
    timer, start = _torch_timer(call), time.perf_counter()
    found = timer.adaptive_autorange(threshold=0.1, min_run_time=share_s, max_run_time=share_s)
    return Measured(list(found.times), time.perf_counter() - start)


def _quartiles_apart(a: Times, b: Times) -> bool:
    """Whether the ranges from the first to the third quartile, printed by Measurement as IQR, do not overlap."""
    (low_a, high_a), (low_b, high_b) = np.percentile(a, (25, 75)), np.percentile(b, (25, 75))
    return bool(low_a > high_b or low_b > high_a)


def _coloured(a: Times, b: Times) -> bool:
    """Apply Compare's colours: a median more than 1 % above the best is not coloured as best.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/utils/benchmark/utils/compare.py, color_segment
    """
    low, high = sorted((_median(a), _median(b)))
    return high > 1.01 * low and high > low + 100e-9


_TORCH_STATISTICS = {"median": _median, "mean": _mean}
_TORCH_RULES: dict[str, Rule] = {
    "IQRs apart": _quartiles_apart,
    "Compare's colours": _coloured,
    "Mann-Whitney on blocks": _mann_whitney,
}

# ---- pyperf --------------------------------------------------------------------------------------------------------

_runners: list[Any] = []  # it allows one Runner for each process


def _pyperf(call: Callable[[], object], share_s: float) -> Measured:
    """Act as one worker process of pyperf: calibrate loops, one warm-up value, then values until the share is spent.

    By default pyperf takes 3 values of at least 0.1 s in each of 20 processes, one after another: some 10 s for each
    function, and 21 imports of torch. That does not fit into a few seconds, so this runs its timing loop in this one
    process, with its options --worker, --calibrate-loops and --min-time (a thirtieth of the share, 0.1 s at most). This
    loses pyperf's protection against memory layouts that differ between processes. At least 3 values.
    Source: https://pyperf.readthedocs.io/en/latest/runner.html
    """
    import pyperf

    start = time.perf_counter()
    if not _runners:
        _runners.append(pyperf.Runner())
        _runners[0].parse_args(["--worker", "--loops=1", "--warmups=1", "--quiet"])
    runner = _runners[0]
    args = runner.args
    args.min_time, args.values = min(0.1, share_s / 30), 1
    args.loops, args.calibrate_loops = 0, True
    calibrated = _bench(runner, call)
    args.loops, args.calibrate_loops = int(calibrated.get_metadata()["loops"]), False
    value_s = calibrated.get_runs()[0].warmups[-1][1] * args.loops
    args.values = max(3, int((share_s - (time.perf_counter() - start)) / value_s) - 1)
    values = [float(value) for value in _bench(runner, call).get_values()]
    return Measured(values, time.perf_counter() - start)


def _bench(runner: Any, call: Callable[[], object]) -> Any:  # noqa: ANN401 - pyperf's Runner and Benchmark
    name = f"call {time.perf_counter_ns()}"  # it requires unique names
    with contextlib.redirect_stdout(io.StringIO()):
        return runner.bench_func(name, call)


def _pyperf_t_test(a: Times, b: Times) -> bool:
    """Apply compare_to's test: Student's t at 95 %; it needs equally many values of A and B.

    Source: https://github.com/psf/pyperf/blob/main/pyperf/_utils.py, is_significant
    """
    from pyperf._utils import is_significant

    number = min(len(a), len(b))
    return bool(is_significant(list(a[:number]), list(b[:number]))[0])


RIVALS = (
    Rival(
        name="pytest-benchmark",
        measure=_pytest_benchmark(),
        statistics=_PYTEST_STATISTICS,
        rules=_PYTEST_RULES,
    ),
    Rival(
        name="pytest-benchmark --benchmark-precision 0.02",
        measure=_pytest_benchmark("--benchmark-precision=0.02"),
        statistics=_PYTEST_STATISTICS,
        rules=_PYTEST_RULES,
    ),
    Rival(name="torch blocked_autorange", measure=_blocked, statistics=_TORCH_STATISTICS, rules=_TORCH_RULES),
    Rival(name="torch adaptive_autorange", measure=_adaptive, statistics=_TORCH_STATISTICS, rules=_TORCH_RULES),
    Rival(
        name="pyperf",
        measure=_pyperf,
        statistics={"mean": _mean, "median": _median},
        rules={"compare_to (t test)": _pyperf_t_test},
    ),
)

OURS = "attnbench"
AXES: dict[str, Any] = {"seq_len": 256, "mask": "none", "direction": "inference"}


def ours(base: str, candidate: str, budget_s: float, seed: int) -> list[Row]:
    """Run one comparison by attnbench in fresh processes, as a test does."""
    from attnbench.pytest_plugin import AttentionBench

    start = time.perf_counter()
    asked: dict[str, Any] = {"budget_s": budget_s, "false_share": ALPHA, "isolation": "process", **AXES}
    found = AttentionBench(seed)(f"{candidate}:mine", f"candidate={base}:mine", **asked)
    at: Row = {"tool": OURS, "wall_s": time.perf_counter() - start}
    alarms = float(str(found.verdict) in {"slower", "faster"})
    return [
        {**at, "statistic": "ratio", "log": float(np.log(found.ratio))},
        {**at, "rule": "verdict", "alarms": alarms},
    ]


def theirs(tool: Rival, calls: tuple[Callable[[], object], Callable[[], object]], budget_s: float) -> list[Row]:
    """Run one comparison by a rival: a row for each statistic and each rule."""
    found = compare(tool, *calls, budget_s)
    at: Row = {"tool": tool.name, "wall_s": found.wall_s}
    rows: list[Row] = [{**at, "statistic": name, "log": log} for name, log in found.logs().items()]
    return rows + [{**at, "rule": name, "alarms": float(alarms)} for name, alarms in found.alarms().items()]


def call_of(file: str) -> Callable[[], object]:
    """Load the function of a file, bound to inputs of its own."""
    import torch

    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    draws = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 8, AXES["seq_len"], 64, generator=draws) for _ in range(3)]

    def call() -> object:
        with torch.no_grad():
            return module.mine(*given)

    return call


def main(base: str, candidate: str, budget: str, number: str) -> None:
    """Compare by every tool, in random order, in equal time."""
    draws, budget_s = random.Random(int(number)), float(budget)
    calls, rows = (call_of(base), call_of(candidate)), list[Row]()
    for tool in draws.sample([None, *RIVALS], len(RIVALS) + 1):
        rows += ours(base, candidate, budget_s, int(number)) if tool is None else theirs(tool, calls, budget_s)
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:5])
