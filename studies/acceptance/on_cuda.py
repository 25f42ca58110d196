"""Test the clock of a CUDA device (tests G1 to G5); each test is a function that uses the first device by default.

Each function also accepts a simulated device. With such devices, tests/studies show that a test passes on a healthy
device and fails on a faulty one.

Sources: meaning of event times, https://docs.nvidia.com/cuda/cuda-c-best-practices-guide (timing with GPU events);
spinning kernel and flush outside of the span, https://github.com/NVIDIA/nvbench.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from attnbench.devices import CaptureError, Clock, nvml
from attnbench.statistics.intervals import pairs
from attnbench.statistics.verdict import half_widths
from attnbench.storage.records import Arm, Verdict
from attnbench.timing import blocks
from attnbench.timing.functions import FunctionComparison
from studies.acceptance.gpus import Call, CudaGpu
from studies.acceptance.outcome import CONFIDENCE, Outcome
from studies.frame import Row
from studies.simulated.gpu import SimulatedGpu

Gpu = CudaGpu | SimulatedGpu

NUM_CALLS, NUM_REPEATS = 50, 9
NUM_ROUNDS = 6
"""Rounds of G1 and G5. Each round times a call with both methods; each method begins half of the rounds."""
SUM_SHARE, GRAPH_SHARE = 0.02, 0.03
SHORTEST_S = 20e-6
"""Shortest call that G1 and G5 judge, in seconds."""
GAP_S = 1.2e-6
"""Seconds between two consecutive kernels of a call on a GPU: part of the call's time, but not of the kernels' time."""
INSIDE, BEYOND, UNDECIDED = "inside", "beyond", "not decided"
"""Verdicts on a row, by the position of its interval relative to the limit. An interval may be too wide for a decision:
if a GPU is at its power cap, its clock frequency varies by a third, and so do times."""
FEWEST_INSIDE = 3
"""Fewest rows inside the limit that a test needs to pass."""
COLDER = 1.05
FLUSH_S = 20e-3
HEAT_S = 3.0
NUM_SESSIONS = 8
"""Sessions of G3."""


def by_events(clock: Clock, call: Call) -> float:
    """Return the seconds that a call takes by the device's clock: the median of a few samples."""
    clock.elapsed(call, NUM_CALLS)
    return median(clock.elapsed(call, NUM_CALLS) / NUM_CALLS for _ in range(NUM_REPEATS))


def schedule(ways: Sequence[str], draws: random.Random) -> list[str]:
    """Order the turns of two timing methods so that a steady drift affects both equally."""
    one, other = ways
    rounds = [[one, other], [other, one]] * (NUM_ROUNDS // 2)
    draws.shuffle(rounds)
    return [way for each in rounds for way in each]


def kernel_sum(gpu: Gpu | None = None) -> Outcome:
    """Run G1: compare the time of a call by the device's clock with the profiler's sum of kernel times."""
    gpu = gpu or CudaGpu()
    limit = f"within {SUM_SHARE:.0%} and {GAP_S * 1e6:g} us for each kernel, above {SHORTEST_S * 1e6:g} us"
    title = "device time against the profiler's kernel sum"
    rows = []
    for name, call in gpu.calls().items():
        row = _row(gpu, name, call, lambda it: gpu.kernel_seconds(it, NUM_CALLS) / NUM_CALLS)
        if "error" not in row:
            row["num_kernels"] = gpu.num_kernels(call)
        rows.append(_judged(row, SUM_SHARE))
    return _outcome(rows, id="G1", title=title, limit=limit)


def graph_mode(gpu: Gpu | None = None) -> Outcome:
    """Run G5: compare the time of a call (event mode) with the time of its replay as a CUDA graph (graph mode)."""
    gpu = gpu or CudaGpu()
    limit = f"within {GRAPH_SHARE:.0%} above {SHORTEST_S * 1e6:g} us"
    rows = []
    for name, call in gpu.calls().items():
        row = _row(gpu, name, call, lambda it: by_events(gpu.clock, gpu.captured(it)))
        rows.append(_judged(row, GRAPH_SHARE))
    return _outcome(rows, id="G5", title="event mode against graph mode", limit=limit)


def _row(gpu: Gpu, name: str, call: Call, other: Callable[[Call], float]) -> Row:
    """Time a call alternately with the device's clock and with `other`; return the two medians, or the first error.

    The row also has the relative difference with its 95 % interval, the reasons for which the device slowed down and,
    for each turn, the time and the device's clock frequency.
    """
    ways: dict[str, Callable[[Call], float]] = {"timed": partial(by_events, gpu.clock), "other": other}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    clocks: dict[str, list[float]] = {way: [] for way in ways}
    turns, slowed_by = schedule([*ways], random.Random(name)), 0
    gpu.state()  # discards the frequency that earlier calls showed
    try:
        for way in turns:
            seconds[way].append(ways[way](call))
            state = gpu.state()
            clocks[way].append(state.clock_mhz)
            slowed_by |= state.slowed_by
    except (RuntimeError, CaptureError) as error:
        return {"call": name, "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    row: Row = {"call": name, "slowed_by": nvml.reasons(slowed_by)}
    for way in ways:
        row |= {f"{way}_s": median(seconds[way]), f"{way}_turns_s": seconds[way], f"{way}_clocks_mhz": clocks[way]}
    return row | dict(zip(("low", "share", "high"), _interval(seconds, turns), strict=True))


def _interval(seconds: Mapping[str, Sequence[float]], turns: Sequence[str]) -> tuple[float, float, float]:
    """Return (low, share, high): the relative difference of the two methods, between the ends of its 95 % interval.

    A steady drift makes the difference larger in rounds that one method begins, and smaller in the others. There are
    equally many rounds of both kinds, so the spread is taken around the mean of each kind.
    """
    logs = np.log(seconds["timed"]) - np.log(seconds["other"])
    begins = np.array(turns[::2]) == turns[0]
    spread = sum(float(np.sum((part - part.mean()) ** 2)) for part in (logs[begins], logs[~begins]))
    degrees = len(logs) - 2
    half = float(half_widths(math.sqrt(spread / degrees / len(logs)), degrees, 1 - CONFIDENCE))
    low, share, high = np.expm1(logs.mean() + np.array([-half, 0.0, half])).tolist()
    return low, share, high


def _judged(row: Row, limit: float) -> Row:
    """Add the verdict (INSIDE, BEYOND or UNDECIDED) to a row; a row with an error or a short call gets none."""
    if "error" in row or row["other_s"] < SHORTEST_S:
        return row
    highest = limit + GAP_S * row.get("num_kernels", 0) / row["other_s"]
    is_inside = -limit <= row["low"] and row["high"] <= highest
    is_beyond = row["high"] < -limit or row["low"] > highest
    return row | {"verdict": INSIDE if is_inside else BEYOND if is_beyond else UNDECIDED}


def _outcome(rows: list[Row], **about: str) -> Outcome:
    """Build the outcome: a pass if no row has an error, none is BEYOND, and at least FEWEST_INSIDE are INSIDE."""
    verdicts = [row.get("verdict") for row in rows]
    is_whole = not any("error" in row for row in rows)
    passes = is_whole and BEYOND not in verdicts and verdicts.count(INSIDE) >= FEWEST_INSIDE
    return Outcome(found=", ".join(map(_sentence, rows)), passes=passes, rows=tuple(rows), **about)


def _sentence(row: Row) -> str:
    if "error" in row:
        return f"{row['call']} cannot be timed both ways ({row['error']})"
    text = f"{row['call']} {row['share']:+.2%} of {row['other_s'] * 1e6:.0f} us"
    if row.get("verdict") != UNDECIDED:
        return text
    clocks = [clock for clock in (*row["timed_clocks_mhz"], *row["other_clocks_mhz"]) if clock]
    why = [row["slowed_by"], f"{min(clocks) / 1e3:.2f} to {max(clocks) / 1e3:.2f} GHz" if clocks else ""]
    return f"{text} ({', '.join([UNDECIDED, *filter(None, why)])})"


def cold_caches(gpu: Gpu | None = None) -> Outcome:
    """Run G2: time a copy that fits into the largest cache, with warm and with cold caches.

    Single calls are timed. Before each call, the copy itself is called for warm caches, or the flush for cold ones.
    """
    gpu = gpu or CudaGpu()
    copy, moved = gpu.copy()
    warm_s = _alone_s(gpu.clock, copy, copy)
    cold_s = _alone_s(gpu.clock, copy, gpu.flush)
    peak = gpu.peak_bytes_per_s()
    passes = cold_s > COLDER * warm_s and peak is not None and moved / cold_s < peak
    known = "not known" if peak is None else f"{peak / 1e12:.2f} TB/s"
    return Outcome(
        id="G2",
        title=f"cold against hot caches, a copy of {moved / 2 / 2**20:.0f} MiB",
        limit="they differ, and cold bandwidth stays below the memory's peak",
        found=f"hot {moved / warm_s / 1e12:.2f} TB/s, cold {moved / cold_s / 1e12:.2f} TB/s, peak {known}",
        passes=passes,
        rows=({"warm_s": warm_s, "cold_s": cold_s, "bytes": float(moved)},),
    )


def _alone_s(clock: Clock, call: Call, flush: Call) -> float:
    """Return the median device seconds of single calls, timed as in a run, with a call of `flush` before each."""
    timed = blocks.TimedCall(arm=Arm(implementation="a"), call=call)
    single = ((timed.arm, 1.0),)  # a call that is known to take 1 s is alone in its sample
    at = blocks.Visit(epoch=0, number=0, num_blocks=NUM_REPEATS, seed=0, known=single)
    taken = blocks.visit([timed], clock, at, blocks.Conditions(flush=flush))
    return median(sample.value for sample in taken[timed.arm])


def heat_up(gpu: Gpu | None = None) -> Outcome:
    """Run G3: compare the same code with itself while the device heats up and cools down."""
    gpu = gpu or CudaGpu()
    work = gpu.fixed_work()
    rows: list[Row] = []
    for number in range(NUM_SESSIONS):
        if number % 2:
            gpu.heat(HEAT_S)
        settings: Any = {"clock": gpu.clock, "gauge_work": gpu.interference_probe(), "seed": number}
        found = FunctionComparison({"a": work, "b": work}, "a", **settings)
        found.run(1.0, stops=False)
        _, logs = pairs(found.samples[Arm(implementation="b")], found.samples[found.reference], found.discarded)
        is_alarm = found.judgements["b"].verdict in {Verdict.faster, Verdict.slower}
        rows.append({"is_hot": float(number % 2), "is_alarm": float(is_alarm), "log": float(logs.mean())})
    alarms, limit = sum(float(row["is_alarm"]) for row in rows), _largest_count(len(rows))
    spread = math.sqrt(sum(float(row["log"]) ** 2 for row in rows) / len(rows))
    return Outcome(
        id="G3",
        title="the same code through an artificial heat-up: false alarms at 5 %",
        limit=f"at most {limit} of {len(rows)}",
        found=f"{alarms:.0f} of {len(rows)}; RMS of the log ratio {spread:.2%}",
        passes=alarms <= limit,
        rows=tuple(rows),
    )


def flush(gpu: Gpu | None = None) -> Outcome:
    """Run G4: keep the device busy for 20 ms before a call of microseconds, whose time must not include these 20 ms."""
    gpu = gpu or CudaGpu()
    work = gpu.short_work()
    plain_s = _alone_s(gpu.clock, work, lambda: None)
    beside_s = _alone_s(gpu.clock, work, gpu.busy(FLUSH_S))
    return Outcome(
        id="G4",
        title="the flush and the timed span",
        limit=f"a flush of {FLUSH_S * 1e3:g} ms adds less than a thousandth of it to a call",
        found=f"{plain_s * 1e6:.1f} us without, {beside_s * 1e6:.1f} us with it",
        passes=beside_s - plain_s < FLUSH_S / 1000,
        rows=({"plain_s": plain_s, "beside_s": beside_s},),
    )


def _largest_count(number: int) -> int:
    """Return the 95th percentile of the number of alarms in `number` sessions, if an alarm has a probability of 5 %."""
    from scipy.stats import binom

    return int(binom.ppf(0.95, number, 0.05))


TESTS = {"G1": kernel_sum, "G2": cold_caches, "G3": heat_up, "G4": flush, "G5": graph_mode}
