"""G1 to G5: tests of a CUDA device's clock, one function each; by default on the first device.

Each also takes a simulated `Gpu`, which shows that the test passes on a healthy device and fails on a faulty one.

Sources: meaning of event times, https://docs.nvidia.com/cuda/cuda-c-best-practices-guide (timing with GPU events);
spinning kernel and flush outside of the span, https://github.com/NVIDIA/nvbench.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

from attnbench.devices import CaptureError, Clock
from attnbench.statistics.intervals import pairs
from attnbench.storage.records import Arm, Verdict
from attnbench.timing import blocks
from attnbench.timing.functions import FunctionComparison
from studies.acceptance.gpus import Call, CudaGpu
from studies.acceptance.outcome import Outcome
from studies.frame import Row
from studies.simulated.gpu import SimulatedGpu

Gpu = CudaGpu | SimulatedGpu

NUM_CALLS, NUM_REPEATS = 50, 9
NUM_ROUNDS = 6
"""Rounds of G1 and G5. Each runs both ways; every order comes equally often."""
KERNEL_S, KERNEL_SHARE = 20e-6, 0.02
GAP_S = 1.2e-6
"""Seconds between two kernels in a row on a GPU, which belong to a call and to no kernel."""
GRAPH_S, GRAPH_SHARE = 50e-6, 0.03
COLDER = 1.05
FLUSH_S = 20e-3
HEAT_S = 3.0
NUM_SESSIONS = 8
"""Sessions of G3."""


def by_events(clock: Clock, call: Call) -> float:
    """Measure the device seconds of a call: the median of a few samples."""
    clock.elapsed(call, NUM_CALLS)
    return median(clock.elapsed(call, NUM_CALLS) / NUM_CALLS for _ in range(NUM_REPEATS))


def schedule(ways: Sequence[str], draws: random.Random) -> list[str]:
    """Order the turns of two timing methods so that a steady drift affects both equally."""
    one, other = ways
    rounds = [[one, other], [other, one]] * (NUM_ROUNDS // 2)
    draws.shuffle(rounds)
    return [way for each in rounds for way in each]


def kernel_sum(gpu: Gpu | None = None) -> Outcome:
    """Compare device time with the profiler's kernel sum."""
    gpu = gpu or CudaGpu()
    limit = f"within {KERNEL_SHARE:.0%} and {GAP_S * 1e6:g} us for each kernel, above {KERNEL_S * 1e6:g} us"
    title = "device time against the profiler's kernel sum"
    asked = Outcome(id="G1", title=title, limit=limit, found="", passes=False)
    rows = _rows(gpu, lambda call: gpu.kernel_seconds(call, NUM_CALLS) / NUM_CALLS)
    for row in rows:
        if "error" not in row:
            row["num_kernels"] = gpu.num_kernels(gpu.calls()[str(row["call"])])
    return _beside(rows, asked, (KERNEL_S, KERNEL_SHARE))


def graph_mode(gpu: Gpu | None = None) -> Outcome:
    """Compare event mode with graph mode."""
    gpu = gpu or CudaGpu()
    limit = f"within {GRAPH_SHARE:.0%} above {GRAPH_S * 1e6:g} us"
    title = "event mode against graph mode"
    asked = Outcome(id="G5", title=title, limit=limit, found="", passes=False)
    rows = _rows(gpu, lambda call: by_events(gpu.clock, gpu.captured(call)))
    return _beside(rows, asked, (GRAPH_S, GRAPH_SHARE))


def _rows(gpu: Gpu, other: Callable[[Call], float]) -> list[Row]:
    """Time each call by the clock and by another method, interleaved; a call that raises gives a row with the error."""
    draws = random.Random(0)
    rows: list[Row] = []
    for name, call in gpu.calls().items():
        ways = {"timed_s": partial(by_events, gpu.clock, call), "other_s": partial(other, call)}
        taken: dict[str, list[float]] = {way: [] for way in ways}
        try:
            for way in schedule(list(ways), draws):
                taken[way].append(ways[way]())
        except (RuntimeError, CaptureError) as error:
            rows.append({"call": name, "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"})
            continue
        apart = mean(math.log(timed / others) for timed, others in zip(*taken.values(), strict=True))
        timed_s, other_s = (median(taken[way]) for way in ways)
        rows.append({"call": name, "timed_s": timed_s, "other_s": other_s, "share": math.expm1(apart)})
    return rows


def _beside(rows: list[Row], outcome: Outcome, limits: tuple[float, float]) -> Outcome:
    """Judge whether each long enough call is within a share of the other clock's time."""
    from msgspec.structs import replace

    shortest_s, share = limits
    timed = [row for row in rows if "error" not in row]
    judged = [row for row in timed if float(row["other_s"]) >= shortest_s]
    said = [f"{row['call']} {row['share']:+.2%} of {float(row['other_s']) * 1e6:.0f} us" for row in timed]
    said += [f"{row['call']} cannot be timed both ways ({row['error']})" for row in rows if "error" in row]
    shares, is_whole = ", ".join(said), len(timed) == len(rows)
    gaps = [GAP_S * float(row.get("num_kernels", 0)) / float(row["other_s"]) for row in judged]
    is_near = [-share <= float(row["share"]) <= share + gap for row, gap in zip(judged, gaps, strict=True)]
    passes = is_whole and bool(judged) and all(is_near)
    return replace(outcome, found=shares, passes=passes, rows=tuple(rows))


def cold_caches(gpu: Gpu | None = None) -> Outcome:
    """Time a copy that fits into the largest cache, from warm and from cold caches.

    Both are single calls, each after a kernel outside of its span: the copy itself, or the flush.
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
    """Measure the median device seconds of single calls after a flush (or its substitute), as the engine does."""
    timed = blocks.TimedCall(arm=Arm(implementation="a"), call=call)
    single = ((timed.arm, 1.0),)  # a call of this length is alone in its sample
    at = blocks.Visit(epoch=0, number=0, num_blocks=NUM_REPEATS, seed=0, known=single)
    taken = blocks.visit([timed], clock, at, blocks.Conditions(flush=flush))
    return median(sample.value for sample in taken[timed.arm])


def heat_up(gpu: Gpu | None = None) -> Outcome:
    """Compare the same code with itself while the device heats up and cools down."""
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
    """Flush for 20 ms before a call of microseconds: the call's time must not include it."""
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
    """Return the number of alarms among `number` that is exceeded with a chance of 5 % if each occurs with 5 %."""
    from scipy.stats import binom

    return int(binom.ppf(0.95, number, 0.05))


TESTS = {"G1": kernel_sum, "G2": cold_caches, "G3": heat_up, "G4": flush, "G5": graph_mode}
