"""T15: what the engine adds to an operation of about 100 us.

Definition: the time per call that a visit of the engine reports, over the time per call of `timeit.Timer.timeit`, a
bare loop between two reads of the timer, for as many calls, the two in a new random order each time. Next to it is
printed how much of the visits' wall time lies outside of calls: timer reads, load average, counts of page faults,
drawing orders, records. A worker's heartbeat for each turn and the interference probe are not in it.
"""

import math
import random
import time
import timeit
from typing import Any

import numpy as np
import pandas as pd

from attnbench.devices.cpu import CpuClock
from attnbench.storage.records import Arm
from attnbench.timing import blocks
from studies.acceptance import workloads
from studies.acceptance.engine import BLOCKS
from studies.acceptance.outcome import LABELS, Outcome, Row
from studies.acceptance.plan import OVERHEAD, Size


def interleave(number: int, size: Size) -> list[Row]:
    """Pairs of a visit and bare loops, as many samples by each."""
    rows: list[Row] = []
    clock, draws, conditions = CpuClock(), random.Random(f"T15/{number}"), blocks.Conditions()
    with workloads.ready(workloads.HUNDRED_US) as call:
        timed, bare = blocks.TimedCall(arm=Arm(implementation="a"), call=call), timeit.Timer(call)
        call_s = blocks.calibrate([timed], clock, blocks.MIN_SAMPLE_S)[timed.arm]
        known = (blocks.Known(arm=timed.arm, call_s=call_s),)
        num_calls = blocks.choose({timed.arm: call_s}, blocks.MIN_SAMPLE_S).num_calls
        for turn in range(size.num_repeats):
            at = blocks.Visit(epoch=0, number=turn, num_blocks=BLOCKS, seed=turn, known=known)
            found: dict[str, float] = {}
            for who in draws.sample(("engine", "bare"), 2):
                if who == "bare":
                    taken = []
                    for _ in range(BLOCKS):
                        call()
                        taken.append(bare.timeit(num_calls) / num_calls)
                    found["bare"] = float(np.median(taken))
                else:
                    before, start = timed.called_s, time.perf_counter()
                    samples = blocks.visit([timed], clock, at, conditions)[timed.arm]
                    found["wall_s"], found["called_s"] = time.perf_counter() - start, timed.called_s - before
                    found["engine"] = float(np.median([sample.value for sample in samples]))
            rows.append({"log": math.log(found["engine"] / found["bare"]), **found})
    return rows


def overhead(rows: list[Row], *, short: bool) -> Outcome:
    """The median log ratio of engine to bare loop."""
    frame: Any = pd.DataFrame(rows)
    added = math.expm1(float(frame["log"].median()))
    outside = 1 - float(frame["called_s"].sum() / frame["wall_s"].sum())
    error = 1.25 * float(frame["log"].std()) / math.sqrt(len(frame))
    return Outcome(
        id=LABELS["overhead"],
        title="what the engine adds to an operation of about 100 us",
        limit=f"at most {OVERHEAD:.0%} of the time per call, against timeit's bare loop, interleaved",
        found=f"{added:+.3%} (standard error {error:.3%}) of {frame['bare'].median() * 1e6:.0f} us, n={len(frame)}; "
        f"outside of calls {outside:.1%} of a visit's wall time (the garbage collection before it included)",
        passes=added <= OVERHEAD,
        is_short=short,
        rows=tuple(rows),
    )
