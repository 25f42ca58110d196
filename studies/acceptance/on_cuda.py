"""G1 to G5: what the clock of a CUDA device must show. Each is made by one function, on the first device.

Sources: what an event measures, https://docs.nvidia.com/cuda/cuda-c-best-practices-guide (timing with GPU events); a
spinning kernel and a flush outside of the span, https://github.com/NVIDIA/nvbench.
"""

import math
import random
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from attnbench.devices import Clock, device
from attnbench.devices.cuda import cache_bytes
from attnbench.statistics.evidence import e_values
from attnbench.statistics.intervals import pairs
from attnbench.storage.records import Arm
from attnbench.timing import blocks
from attnbench.timing.functions import FunctionComparison
from studies.acceptance.outcome import LABELS, Outcome, Row
from studies.acceptance.plan import LARGEST_E, largest_count

Call = Callable[[], object]

DEVICE = "cuda"
NUM_CALLS, NUM_REPEATS = 50, 9
NUM_ROUNDS = 5
"""Of G1 and G5, in each of which both ways have their turn, in a random order."""
KERNEL_S, KERNEL_SHARE = 20e-6, 0.02
GRAPH_S, GRAPH_SHARE = 50e-6, 0.03
FLUSH_S = 20e-3
HEAT_S = 3.0
NUM_SESSIONS = {True: 8, False: 60}
"""Of G3, in the short form and in the full one."""


def calls() -> dict[str, Call]:
    """From some 10 us to some milliseconds: matrix products, elementwise work of several kernels, attention."""
    found: dict[str, Call] = {}
    for size in (512, 2048, 4096):
        left, right = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16).unbind()
        found[f"matmul {size}"] = partial(torch.matmul, left, right)
    for length in (512, 4096):
        query, key, value = torch.randn(3, 2, 16, length, 128, device=DEVICE, dtype=torch.bfloat16).unbind()
        found[f"attention {length}"] = partial(functional.scaled_dot_product_attention, query, key, value)
    rows = torch.randn(2**13, 2**12, device=DEVICE)
    found["three kernels"] = lambda: torch.softmax(rows * 2.0, -1) + 1.0
    return found


def by_events(clock: Clock, call: Call) -> float:
    """Device seconds of a call: the median of a few samples."""
    clock.elapsed(call, NUM_CALLS)
    return median(clock.elapsed(call, NUM_CALLS) / NUM_CALLS for _ in range(NUM_REPEATS))


def kernel_seconds(call: Call) -> float:
    """Seconds of a call inside kernels, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(NUM_CALLS):
            call()
        torch.cuda.synchronize()
    spent_us = sum(float(event.self_device_time_total) for event in seen.key_averages())
    return spent_us * 1e-6 / NUM_CALLS


def kernel_sum(*, short: bool = False) -> Outcome:
    """Device time against the profiler's kernel sum."""
    limit = f"within {KERNEL_SHARE:.0%} above {KERNEL_S * 1e6:g} us"
    title = "device time against the profiler's kernel sum"
    asked = Outcome(id=LABELS["kernel_sum"], title=title, limit=limit, found="", passes=False, is_short=short)
    return _beside(_rows(lambda _, call: kernel_seconds(call)), asked, (KERNEL_S, KERNEL_SHARE))


def graph_mode(*, short: bool = False) -> Outcome:
    """Event mode against graph mode."""
    limit = f"within {GRAPH_SHARE:.0%} above {GRAPH_S * 1e6:g} us"
    asked = Outcome(
        id=LABELS["graph_mode"],
        title="event mode against graph mode",
        limit=limit,
        found="",
        passes=False,
        is_short=short,
    )
    return _beside(_rows(lambda clock, call: by_events(clock, captured(call))), asked, (GRAPH_S, GRAPH_SHARE))


def _rows(other: Callable[[Clock, Call], float]) -> list[Row]:
    """Each call by the clock and by another way to time it, interleaved in random order."""
    clock, draws = device(DEVICE).clock, random.Random(0)
    rows: list[Row] = []
    for name, call in calls().items():
        ways = {"timed_s": partial(by_events, clock, call), "other_s": partial(other, clock, call)}
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(NUM_ROUNDS):
            for way in draws.sample(sorted(ways), len(ways)):
                taken[way].append(ways[way]())
        timed_s, other_s = (median(taken[way]) for way in ("timed_s", "other_s"))
        rows.append({"call": name, "timed_s": timed_s, "other_s": other_s, "share": timed_s / other_s - 1})
    return rows


def captured(call: Call) -> Call:
    """The call's kernels as a graph, launched at once.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _beside(rows: list[Row], outcome: Outcome, limits: tuple[float, float]) -> Outcome:
    """The outcome where each call that lasts long enough is to be within a share of another clock's time."""
    from msgspec.structs import replace

    shortest_s, share = limits
    judged = [row for row in rows if float(row["other_s"]) >= shortest_s]
    shares = ", ".join(f"{row['call']} {row['share']:+.2%} of {float(row['other_s']) * 1e6:.0f} us" for row in rows)
    passes = bool(judged) and all(abs(float(row["share"])) <= share for row in judged)
    return replace(outcome, found=shares, passes=passes, rows=tuple(rows))


def cold_caches(*, short: bool = False) -> Outcome:
    """A copy that fits into the largest cache, from warm and from cold caches."""
    clock, size = device(DEVICE).clock, cache_bytes(DEVICE) // 4
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    warm_s = _alone_s(clock, copy, copy)
    cold_s = _alone_s(clock, copy, device(DEVICE).flush)
    moved, peak = 2 * size, peak_bytes_per_s()
    passes = cold_s > 1.05 * warm_s and peak is not None and moved / cold_s < peak
    known = "not known" if peak is None else f"{peak / 1e12:.2f} TB/s"
    return Outcome(
        id=LABELS["cold_caches"],
        title=f"cold against hot caches, a copy of {size / 2**20:.0f} MiB",
        limit="they differ, and cold bandwidth stays below the memory's peak",
        found=f"hot {moved / warm_s / 1e12:.2f} TB/s, cold {moved / cold_s / 1e12:.2f} TB/s, peak {known}",
        passes=passes,
        is_short=short,
        rows=({"warm_s": warm_s, "cold_s": cold_s, "bytes": float(moved)},),
    )


def peak_bytes_per_s() -> float | None:
    """What the memory's clock and width allow, two transfers for each tick; None where torch does not report them."""
    found = torch.cuda.get_device_properties(DEVICE)
    clock_khz, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return 2 * clock_khz * 1e3 * width / 8 if clock_khz and width else None


def _alone_s(clock: Clock, call: Call, flush: Call) -> float:
    """Device seconds of single calls, after a flush or what stands for it, by the engine's own way: their median."""
    timed = blocks.TimedCall(arm=Arm(implementation="a"), call=call, num_calls=1)
    at = blocks.Visit(epoch=0, number=0, num_blocks=NUM_REPEATS, seed=0)
    taken = blocks.visit([timed], clock, at, blocks.Conditions(flush=flush))
    return median(sample.value for sample in taken[timed.arm])


def heat_up(*, short: bool = False) -> Outcome:
    """The same code against itself while the device heats up and cools down."""
    matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    work = calls()["matmul 2048"]
    rows: list[Row] = []
    for number in range(NUM_SESSIONS[short]):
        end = time.perf_counter() + (HEAT_S if number % 2 else 0.0)
        while time.perf_counter() < end:
            matrix @ matrix
            torch.cuda.synchronize()
        settings: Any = {
            "clock": device(DEVICE).clock,
            "gauge_work": device(DEVICE).interference_probe(),
            "seed": number,
        }
        found = FunctionComparison({"a": work, "b": work}, "a", **settings)
        found.run(1.0, stops=False)
        logs = pairs(found.samples[Arm(implementation="b")], found.samples[found.reference], found.discarded).logs
        largest = float(e_values(logs).max(initial=1.0))
        rows.append({"is_hot": float(number % 2), "largest_e": largest, "log": float(logs.mean())})
    alarms, limit = sum(float(row["largest_e"]) >= LARGEST_E for row in rows), largest_count(len(rows))
    spread = math.sqrt(sum(float(row["log"]) ** 2 for row in rows) / len(rows))
    return Outcome(
        id=LABELS["heat_up"],
        title="the same code through an artificial heat-up: false alarms at 5 %",
        limit=f"at most {limit} of {len(rows)}",
        found=f"{alarms} of {len(rows)}; RMS of the log ratio {spread:.2%}",
        passes=alarms <= limit,
        is_short=short,
        rows=tuple(rows),
    )


def flush(*, short: bool = False) -> Outcome:
    """A flush of 20 ms before a call of microseconds: the call's time must not know of it."""
    clock, source = device(DEVICE).clock, torch.ones(2**16, device=DEVICE)
    spin = 1_000_000
    cycles = int(spin * FLUSH_S / clock.elapsed(lambda: torch.cuda._sleep(spin), 1))  # noqa: SLF001 - as in attnbench.devices.cuda
    plain_s = _alone_s(clock, lambda: source + 1, lambda: None)
    beside_s = _alone_s(clock, lambda: source + 1, lambda: torch.cuda._sleep(cycles))  # noqa: SLF001 - likewise
    return Outcome(
        id=LABELS["flush"],
        title="the flush and the timed span",
        limit=f"a flush of {FLUSH_S * 1e3:g} ms adds less than a thousandth of it to a call",
        found=f"{plain_s * 1e6:.1f} us without, {beside_s * 1e6:.1f} us with it",
        passes=beside_s - plain_s < FLUSH_S / 1000,
        is_short=short,
        rows=({"plain_s": plain_s, "beside_s": beside_s},),
    )
