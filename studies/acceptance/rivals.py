"""Popular tools, each driven as its users do, and the plain loop. One session of W4.

    python -m studies.acceptance.rivals base.py candidate.py 5 SEED [TOOL ...]

Both files define a function `mine`. The session prints a row in JSON for each statistic of each tool: the logarithm of
the ratio of both times. Tools other than attnbench and the plain loop measure A to its end, then B, each in half of the
time, including calibration and warm-up; starting an interpreter, importing torch and collecting tests are free, except
for attnbench.
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
from typing import Any

import numpy as np
import pytest

from studies.acceptance.sessions import LOOP_WARM_S, NEVER, plain_loop
from studies.frame import Row

Times = Sequence[float]
Call = Callable[[], object]

OURS, LOOP = "attnbench", "plain loop"
AXES: dict[str, Any] = {"seq_len": 256, "mask": "none", "direction": "inference"}


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A tool: its times of a call within a number of seconds, and its statistics."""

    measure: Callable[[Call, float], Times]
    statistics: Mapping[str, Callable[[Times], Any]]


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

    def __init__(self, call: Call, share_s: float) -> None:
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
        """Provide this object to the test as its fixture `carrier`."""
        return self


def _pytest_benchmark(call: Call, share_s: float) -> Times:
    """Run pytest in this process with its fixture on the call; calibration and statistics are pytest-benchmark's.

    `--benchmark-max-time` is the share of the budget (default: 1 s); other options keep their defaults: at least 5
    rounds, the collector on, no warm-up. The plug-in sizes all rounds by the first call, which is the slowest, and so
    ends long before its time does. It is run again while there is time, and the rounds are joined.
    Source: https://pytest-benchmark.readthedocs.io/en/latest/usage.html
    """
    carrier = _Carrier(call, share_s)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        root = Path(folder)
        (root / "test_it.py").write_text(TEST_FILE, encoding="utf-8")
        (root / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        asked = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", str(root / "pytest.ini")]
        asked += [f"--rootdir={root}", f"--benchmark-max-time={share_s}", f"--benchmark-storage={root}"]
        code = pytest.main([*asked, str(root / "test_it.py")], plugins=[carrier])
    if code != 0 or not carrier.times:
        raise RuntimeError(f"pytest-benchmark ended with code {code}: {printed.getvalue()[-2000:]}")
    return carrier.times


# ---- torch.utils.benchmark -----------------------------------------------------------------------------------------


def _torch_timer(call: Call, share_s: float) -> Times:
    """Run blocked_autorange with min_run_time equal to its share, with the current number of threads.

    Source: https://docs.pytorch.org/docs/stable/benchmark_utils.html#torch.utils.benchmark.Timer.blocked_autorange
    """
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    times: list[float] = timer.blocked_autorange(min_run_time=share_s).times
    return times


# ---- pyperf --------------------------------------------------------------------------------------------------------

_runners: list[Any] = []  # it allows one Runner for each process


def _pyperf(call: Call, share_s: float) -> Times:
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
    return [float(value) for value in _bench(runner, call).get_values()]


def _bench(runner: Any, call: Call) -> Any:  # noqa: ANN401 - pyperf's Runner and Benchmark
    name = f"call {time.perf_counter_ns()}"  # it requires unique names
    with contextlib.redirect_stdout(io.StringIO()):
        return runner.bench_func(name, call)


RIVALS = {
    "pytest-benchmark": Rival(
        measure=_pytest_benchmark, statistics={"mean": np.mean, "median": np.median, "min": np.min}
    ),
    "torch Timer": Rival(measure=_torch_timer, statistics={"median": np.median, "mean": np.mean}),
    "pyperf": Rival(measure=_pyperf, statistics={"mean": np.mean, "median": np.median}),
}


def ours(files: Sequence[str], budget_s: float, seed: int) -> list[Row]:
    """Run one comparison by attnbench in fresh processes, as a test does, until its budget is spent."""
    from attnbench.pytest_plugin import AttentionBench

    base, candidate = files
    found = AttentionBench(seed)(
        f"{candidate}:mine", f"base={base}:mine", budget_s=budget_s, smallest_effect=NEVER, **AXES
    )
    return [{"tool": OURS, "statistic": "ratio", "log": float(np.log(found.ratio))}]


def loop(files: Sequence[str], budget_s: float) -> list[Row]:
    """Run examples/plain_loop.py: single calls of both in random order."""
    specs = [f"{file}:mine" for file in files]
    found = plain_loop(specs, Path.cwd(), seconds=budget_s / 2 - LOOP_WARM_S, seq_len=AXES["seq_len"])
    return [{"tool": LOOP, "statistic": "ratio", "log": float(np.log(found[1][1]))}]


def theirs(tool: str, files: Sequence[str], budget_s: float) -> list[Row]:
    """Time A to its end, then B, each in half of the budget; a row for each statistic."""
    rival = RIVALS[tool]
    a, b = (rival.measure(call_of(file), budget_s / 2) for file in files)
    return [
        {"tool": tool, "statistic": name, "log": float(np.log(read(b) / read(a)))}
        for name, read in rival.statistics.items()
    ]


def call_of(file: str) -> Call:
    """Load the function of a file, bound to inputs of its own."""
    import torch

    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    draws = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 8, AXES["seq_len"], 64, generator=draws) for _ in range(3)]

    def call() -> object:
        with torch.no_grad():
            return module.mine(*tensors)

    return call


def main(base: str, candidate: str, budget: str, number: str, *tools: str) -> None:
    """Compare by every tool, or by the given ones, in random order, in equal time."""
    draws, budget_s, files, rows = random.Random(int(number)), float(budget), (base, candidate), list[Row]()
    every = tools or (OURS, LOOP, *RIVALS)
    for tool in draws.sample(every, len(every)):
        if tool == OURS:
            rows += ours(files, budget_s, int(number))
        else:
            rows += loop(files, budget_s) if tool == LOOP else theirs(tool, files, budget_s)
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
