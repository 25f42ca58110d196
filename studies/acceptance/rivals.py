"""One session of test W4: compare two files with attnbench, with a plain loop, and with popular tools.

    python -m studies.acceptance.rivals base.py candidate.py 5 SEED [TOOL ...]

Both files define a function `mine`. The session prints rows as JSON, one for each statistic of each tool, with the
logarithm of the candidate's time over the base's. attnbench and the plain loop alternate between the two functions. The
other tools time the first function, then the second, each in half of the time, including calibration and warm-up. The
time to start Python, import torch and collect tests is not counted, except for attnbench.
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
    """A tool: `measure` times a call for a number of seconds, and `statistics` summarise these times."""

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
    """A pytest plug-in that passes the call to the test, and collects the times of all rounds of the test."""

    def __init__(self, call: Call, share_s: float) -> None:
        self.call, self.share_s = call, share_s
        self.times: list[float] = []
        self.wall_s, self.longest_s = 0.0, 0.0

    @property
    def has_time(self) -> bool:
        """Whether a turn as long as the longest one so far still fits into `share_s`; true before the first turn."""
        return not self.times or self.wall_s + self.longest_s < self.share_s

    def keep(self, turn_s: float, rounds: Times) -> None:
        """Record a turn: its duration, and the times of its rounds, in seconds."""
        self.wall_s += turn_s
        self.longest_s = max(self.longest_s, turn_s)
        self.times += rounds

    @pytest.fixture(name="carrier")
    def itself(self) -> "_Carrier":
        """Provide this object to the test as its fixture `carrier`."""
        return self


def _pytest_benchmark(call: Call, share_s: float) -> Times:
    """Time a call with the fixture of pytest-benchmark, in a run of pytest inside this process.

    `--benchmark-max-time` is `share_s`, not 1 s. Other options keep their defaults: at least 5 rounds, garbage
    collection on, no warm-up. pytest-benchmark plans its rounds by the first call, which is the slowest, and so ends
    long before `share_s`. Therefore the test is run again while there is time, and all rounds are joined.
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
    """Time a call with torch's Timer: blocked_autorange for `share_s` seconds, with the current number of threads.

    Source: https://docs.pytorch.org/docs/stable/benchmark_utils.html#torch.utils.benchmark.Timer.blocked_autorange
    """
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    times: list[float] = timer.blocked_autorange(min_run_time=share_s).times
    return times


# ---- pyperf --------------------------------------------------------------------------------------------------------

_runners: list[Any] = []  # pyperf allows one Runner in a process


def _pyperf(call: Call, share_s: float) -> Times:
    """Time a call like one worker process of pyperf: calibrate, take a warm-up value, then values until `share_s`.

    By default pyperf takes 3 values of at least 0.1 s in each of 20 processes, one after another. With 21 imports of
    torch and some 10 s for each function, that does not fit into a few seconds. Therefore pyperf's timing loop runs in
    this one process and takes at least 3 values, with the options --worker, --calibrate-loops and --min-time (a
    thirtieth of `share_s`, at most 0.1 s). This loses pyperf's protection against the luck of one memory layout.
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
    name = f"call {time.perf_counter_ns()}"  # pyperf requires unique names
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
    """Compare both files with attnbench's pytest fixture, in fresh processes, until the budget is spent."""
    from attnbench.pytest_plugin import AttentionBench

    base, candidate = files
    found = AttentionBench(seed)(
        f"{candidate}:mine", f"base={base}:mine", budget_s=budget_s, smallest_effect=NEVER, **AXES
    )
    return [{"tool": OURS, "statistic": "ratio", "log": float(np.log(found.ratio))}]


def loop(files: Sequence[str], budget_s: float) -> list[Row]:
    """Let examples/plain_loop.py compare both files: each round calls each file's function once, in random order."""
    specs = [f"{file}:mine" for file in files]
    found = plain_loop(specs, Path.cwd(), seconds=budget_s / 2 - LOOP_WARM_S, seq_len=AXES["seq_len"])
    return [{"tool": LOOP, "statistic": "ratio", "log": float(np.log(found[1][1]))}]


def theirs(tool: str, files: Sequence[str], budget_s: float) -> list[Row]:
    """Time one file after the other with `tool`, each in half of the budget; return a row for each statistic."""
    rival = RIVALS[tool]
    a, b = (rival.measure(call_of(file), budget_s / 2) for file in files)
    return [
        {"tool": tool, "statistic": name, "log": float(np.log(read(b) / read(a)))}
        for name, read in rival.statistics.items()
    ]


def call_of(file: str) -> Call:
    """Load the function `mine` of a file; return a function that calls it with random inputs (1, 8, 256, 64)."""
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
    """Compare both files with `tools` (default: all), in random order and equal time; print the rows as JSON."""
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
