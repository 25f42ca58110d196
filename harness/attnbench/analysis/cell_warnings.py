"""Warnings about the numbers of one cell: few samples, wide intervals, drift, other work, page faults."""

import math
from collections.abc import Collection, Iterator
from contextlib import suppress

from attnbench.analysis.system_load import SystemLoad
from attnbench.devices import device
from attnbench.statistics.interference import MANY
from attnbench.statistics.intervals import FEWEST_CLUSTERS, Block, Estimate, median
from attnbench.storage.records import Record, Sample, Status
from attnbench.units import plain, show

FEW_SAMPLES = 10
UNSTEADY = math.log(1.5)
"""An interval that reaches so far either way, on the log scale, leaves even a factor of two between two rows open."""
DRIFT = 0.1
"""A time that moves by more than this on the log scale says more of the machine than of the code: trust the ratio."""
ERROR_OF_A_MOVE = math.sqrt(6)
"""The first third of the samples and the last differ by chance: each has an error sqrt(3) times that of the whole, and
a difference of two sqrt(2) times theirs. A move inside so many half widths of the interval is noise, and the interval
says it already: by size alone 38 of 135 cells of a quick sweep on a shared machine drifted, by this rule 2."""
SPARE = 0.5
"""Alone, as many threads as there are cores give a load somewhat below their number, and one busy neighbour adds one.
But the load is a mean over a minute, which comes there late: it counts from half a process above the cores."""
TAKEN = 0.1
"""Of the time of all processors, what others and the host may take before each number carries a warning."""
FAULT_S = 0.25e-6
"""What one minor page fault costs at least: for runs that did not measure it."""
TOLD_FAULTS, MOST_FAULTS, LARGEST_FAULTS = 0.05, 0.5, 0.9
"""Shares of the time: from where page faults are worth a word, from where they dominate, and the most that an estimate
may say, as in analysis/breakdown.py."""


def warnings_of(
    record: Record, time: Estimate | None, discarded: Collection[Block] = (), load: SystemLoad | None = None
) -> Iterator[str]:
    """Each warning about an ok cell; `discarded` are disturbed blocks of its workload, `load` is the run's."""
    if record.status is not Status.ok:
        return
    if record.message:
        yield plain(record.message)
    latency = record.measurement("latency")
    if time is None or latency is None:
        yield "agrees, not timed"
        return
    yield from _few(time)
    yield from _faults(record, latency.samples, time)
    yield from _other_work(record, latency.samples, discarded, load)
    yield from _unsteady(time)
    yield from _drift(latency.samples, time)
    yield from _numbers(record)
    for measurement in record.measurements:
        yield from map(plain, measurement.warnings)


def _few(time: Estimate) -> Iterator[str]:
    if time.num_clusters < FEWEST_CLUSTERS:
        yield f"{time.num_clusters} visit{'s' * (time.num_clusters > 1)}: too few for an interval"
    if time.num_samples < FEW_SAMPLES:
        yield f"{time.num_samples} sample{'s' * (time.num_samples > 1)} only"


def _faults(record: Record, samples: tuple[Sample, ...], time: Estimate) -> Iterator[str]:
    """How many page faults a call has, and what share of its time they are by what this run saw one cost."""
    num_faults = median(sample.num_faults / max(1, sample.num_calls) for sample in samples)
    cost_s = (0.0 if record.operators is None else record.operators.fault_s) or FAULT_S
    share = min(num_faults * cost_s / time.point, LARGEST_FAULTS)
    if share <= TOLD_FAULTS:
        return
    retains = record.environment is not None and "MALLOC_MMAP_MAX_" in record.environment.settings
    hint = "" if retains else ": --allocator retain"
    part = f"about {_percent(share)} of the time"
    if share >= MOST_FAULTS:
        yield f"page faults dominate ({num_faults:,.0f} a call, {part}){hint}"
    else:
        yield f"{num_faults:,.0f} page faults a call ({part}){hint}"


def _other_work(
    record: Record, samples: tuple[Sample, ...], discarded: Collection[Block], system: SystemLoad | None
) -> Iterator[str]:
    """More work than cores while this was timed, many of its blocks discarded, or a busy machine all along."""
    texts = []
    cores = 0 if record.environment is None else record.environment.num_logical_cores
    load = median(sample.load for sample in samples)
    if cores and load > cores + SPARE:
        texts.append(f"load {load:.1f} on {cores} core{'s' * (cores > 1)}")
    blocks = {(sample.epoch, sample.visit, sample.block) for sample in samples}
    num_discarded = len(blocks.intersection(discarded))
    if num_discarded > MANY * len(blocks):
        texts.append(f"{num_discarded} of {len(blocks)} blocks discarded")
    if system is not None and system.others + system.stolen > TAKEN:
        texts.append(f"{_percent(system.others + system.stolen)} of the processors' time during the run")
    if texts:
        yield f"other work on the machine: {', '.join(texts)}"


def _unsteady(time: Estimate) -> Iterator[str]:
    """An interval so wide that the number in the middle of it says little: "unsteady: 155 to 581 us"."""
    if time.low is None or time.high is None or (time.half_width or 0.0) < UNSTEADY:
        return
    low, high = show(time.low, "s"), show(time.high, "s")
    unit = high.rpartition(" ")[2]
    yield f"unsteady: {low.removesuffix(f' {unit}')} to {high}"


def _drift(samples: tuple[Sample, ...], time: Estimate) -> Iterator[str]:
    """Times that moved between the first third and the last, by more than their noise explains."""
    third = len(samples) // 3
    if time.half_width is None or third < FEWEST_CLUSTERS:
        return
    first, last = (median(sample.value for sample in part) for part in (samples[:third], samples[-third:]))
    if abs(math.log(last / first)) > max(DRIFT, ERROR_OF_A_MOVE * time.half_width):
        yield f"drifted by {_percent(last / first - 1)} while it was timed"


def _numbers(record: Record) -> Iterator[str]:
    """What the device makes of a dtype or a precision."""
    with suppress(ValueError):  # a run may come from elsewhere, with a device that this installation has no file for
        yield from device(record.workload.device).notes(record.workload, record.environment)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
