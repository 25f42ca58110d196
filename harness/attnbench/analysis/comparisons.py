"""Compare each implementation of a run with the baseline on the same workload, and judge all comparisons together.

Each process contributes one number to a comparison. A cell is one implementation on one workload. If a session compares
two states of the code (its two sides), there is also a verdict on all cells together.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnbench.analysis.results import Results
from attnbench.analysis.warned import Warn, Warned
from attnbench.devices import nvml
from attnbench.statistics.effects import WHOLE, effects, judge_effects, run_numbers
from attnbench.statistics.interference import MANY
from attnbench.statistics.intervals import are_among, median
from attnbench.statistics.verdict import Effect, Judgement, doubted
from attnbench.storage.records import BASE, LATENCY, Arm, Flag, Key, Operators, Record, Status, Verdict
from attnbench.storage.samples import Samples
from attnbench.units import grouped, percent
from attnbench.workloads.workload import Workload

LARGEST_DETECTABLE = 1.0
"""Largest detectable effect that is stated, as a relative difference: 1.0 is a factor of two."""
CONTENTION = 0.1
"""Share of processor time that other programs and the hypervisor may take before times are doubtful."""
MOST_WAITING = 0.25
"""Largest acceptable share of samples in which threads waited for a processor. Such samples take longer: if they are a
quarter of all, the median is the 67th percentile of the others; if they are half, the median includes waiting."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Judgement):
    """The time of one implementation divided by the baseline's on one workload: below 1.0 is faster.

    The verdict follows from the interval and the margin. At most the share `Plan.false_share` of the verdicts faster
    and slower in a session is expected to be false. If the session compares two states of the code (two sides),
    `Plan.false_share` instead limits the probability of any false verdict in a session without true differences.
    """

    workload: Workload
    implementation: str
    side: str = ""  # candidate in a session with two sides, otherwise empty
    baseline: str  # the implementation compared with; with two sides, the same implementation on the base
    is_same_kernel: bool = False  # the baseline ran the same operators and kernels; False with two sides

    @property
    def key(self) -> Key:
        """The key of the compared cell: its workload id and arm (implementation and side)."""
        return self.workload.id, Arm(implementation=self.implementation, side=self.side)


@lru_cache(maxsize=2)
def session_effects(results: Results) -> dict[Key, Effect]:
    """Compute, by key, the effect (log ratio of times) of each cell timed in the same blocks as its reference.

    The reference is usually the baseline (see `reference`). If two states of the code are compared, the key WHOLE has
    the effect of all cells together.
    """
    samples = samples_of(results)
    pairs: dict[str, dict[Arm, Arm]] = {}
    for workload, arms in samples.items():
        pairs[workload] = {arm: reference(results, (workload, arm)) for arm in arms}
    return effects(results.plan, run_numbers(samples, pairs))


@lru_cache(maxsize=2)
def substitutes(results: Results) -> dict[str, Arm]:
    """Return the implementation (an `Arm`) that replaces a baseline without a time on a workload, by workload id.

    The baseline may have no time because it is wrong. The substitute is the first implementation of the plan that has a
    time. A session with two sides has no substitutes.
    """
    plan, replaced = results.plan, dict[str, Arm]()
    for workload, taken in samples_of(results).items() if plan.sides is None else ():
        timed = [arm for arm in plan.specs if len(taken.get(arm, ()))]
        if timed and not any(map(plan.is_reference, timed)):
            replaced[workload] = timed[0]
    return replaced


def reference(results: Results, key: Key) -> Arm:
    """Return the arm (implementation and side) that a cell is compared with: the baseline or its substitute.

    If two states of the code (sides) are compared, it is the same implementation on the base.
    """
    workload, arm = key
    return substitutes(results).get(workload) or results.plan.reference(arm)


@lru_cache(maxsize=1)
def samples_of(results: Results) -> dict[str, dict[Arm, Samples]]:
    """Return the time samples (seconds per call) of `ok` cells by workload id and arm, without discarded blocks."""
    taken: dict[str, dict[Arm, Samples]] = {}
    for record in results.records:
        if record.status is not Status.ok:
            continue
        workload = record.workload.id
        samples = Samples.of(record.samples(LATENCY))
        disturbed = are_among(samples.places, results.discarded.get(workload, ()))
        taken.setdefault(workload, {})[record.arm] = samples.where(~disturbed)
    return taken


@lru_cache(maxsize=1)
def judgements(results: Results) -> dict[Key, Judgement]:
    """Judge all comparisons of a run together, by key. Comparisons with doubtful times stay undecided.

    If two states of the code are compared, WHOLE has the judgement of all cells together.
    """
    seen = judge_effects(results.plan, session_effects(results))
    return seen | doubted({key: judgement for key, judgement in seen.items() if is_doubtful(results, key)})


@lru_cache(maxsize=1)
def comparisons(results: Results) -> list[Comparison]:
    """Compare every cell that was timed in the same blocks as its reference; references themselves are left out."""
    records = {record.key: record for record in results.records}
    compared = []
    for key, judgement in judgements(results).items():
        if key == WHOLE:
            continue
        record, baseline = records[key], records[key[0], reference(results, key)]
        compared.append(
            Comparison(
                **vars(judgement),
                workload=record.workload,
                implementation=record.implementation,
                side=record.side,
                baseline=baseline.implementation,
                is_same_kernel=not record.side and runs_the_same(record.operators, baseline.operators),
            )
        )
    return compared


@lru_cache(maxsize=1)
def paired_times(results: Results) -> dict[Key, float]:
    """Return the seconds of a call of each timed cell by key, comparable within a workload.

    If a cell has a ratio to its reference, its time is this ratio times the median of the reference. The ratio comes
    from samples in the same blocks, so it is more accurate than the quotient of two medians.
    """
    timed = {record.key: record.samples(LATENCY) for record in results.records}
    median_s = {key: median(Samples.of(samples).value) for key, samples in timed.items() if samples}
    times_s = dict(median_s)
    for key, effect in session_effects(results).items():
        if key != WHOLE:
            times_s[key] = effect.ratio * median_s[key[0], reference(results, key)]
    return times_s


def _by_machine(results: Results) -> Iterable[Sequence[Record]]:
    """Group the records by side or by host, if the run has several; each group should come from one machine."""
    if results.plan.sides is not None:
        return grouped(results.records, lambda record: record.side == BASE).values()
    if results.hosts:
        known = [record for record in results.records if record.host in results.hosts]
        return grouped(known, lambda record: record.host).values()
    return [results.records]


def _has_changed_machine(records: Iterable[Record]) -> bool:
    return len({record.environment.fingerprint for record in records if record.environment is not None}) > 1


def runs_the_same(one: Operators | None, other: Operators | None) -> bool:
    """Return whether two calls ran the same operators and kernels equally often; False if one is unknown."""

    def calls(operators: Operators | None) -> list[tuple[object, ...]]:
        seen = () if operators is None else operators.calls
        return sorted((call.name, call.num_calls, call.kernels) for call in seen)

    return bool(calls(one)) and calls(one) == calls(other)


def whole_session_judgement(results: Results) -> Judgement | None:
    """Return the judgement of all cells together if two states of the code are compared; otherwise None.

    Also None if there is no comparison.
    """
    return judgements(results).get(WHOLE)


def num_processes(results: Results) -> int:
    """Count the processes that timed something."""
    timed = [Samples.of(record.samples(LATENCY)) for record in results.records]
    return len({epoch for samples in timed for epoch in np.unique(samples.epoch).tolist()})


def too_noisy(results: Results) -> Warned | None:
    """Return a warning if noise hides differences as small as the margin; None if it does not.

    There is a warning if at least half of the comparisons are undecided, and the median half-width of their intervals
    exceeds the margin. Decided comparisons stop early with wide intervals, so only undecided ones show the noise.
    """
    judged, margin = judgements(results).values(), results.plan.smallest_effect
    noise = sorted(
        (judgement.half_width, judgement.detectable)
        for judgement in judged
        if judgement.verdict is Verdict.undecided and judgement.half_width is not None and judgement.detectable
    )
    if not noise or 2 * len(noise) < len(judged):
        return None
    half, detectable = noise[len(noise) // 2]
    if half <= math.log1p(margin):
        return None
    visible = f"about {percent(detectable)} can be detected" if detectable < LARGEST_DETECTABLE else "run it longer"
    hint = " --conditions steady may be less noisy." if results.plan.allocator == "system" else ""
    return Warn.too_noisy.says(f"This session is too noisy for a margin of {percent(margin)}: {visible}.{hint}")


def contention(results: Results) -> Warned | None:
    """Return a warning if other programs and the hypervisor took more than CONTENTION of the processors' time.

    None if they took less, if their share is unknown, or if nothing was timed.
    """
    load = results.system_load
    if load is None or load.others + load.stolen <= CONTENTION or not any(results.num_visits.values()):
        return None
    taken = f"other processes used {percent(load.others)} of the processors' time, and the hypervisor used"
    text = f"High CPU contention during the run: {taken} {percent(load.stolen)}. Times may be too long."
    return Warn.contention.says(text)


def waiting(results: Results) -> dict[Key, float]:
    """Return the share of samples in which threads waited for a processor, by key.

    Cells that do not record it are left out.
    """
    timed = {record.key: Samples.of(record.samples(LATENCY)).flags for record in results.records}
    return {
        key: float(((flags & Flag.waited) != 0).mean())
        for key, flags in timed.items()
        if len(flags) and ((flags & Flag.waits_read) != 0).all()
    }


@lru_cache(maxsize=1)
def cell_doubts(results: Results) -> dict[Key, Warned]:
    """Return the reason to distrust the time of each doubtful cell, by key."""
    busy, doubts = "other work kept the machine busy", dict[Key, Warned]()
    for record in results.records:
        why = results.throttled.get(record.workload.id, 0) & ~nvml.POWER_CAP  # a power cap is usual for a busy GPU
        if why and record.samples(LATENCY):
            doubts[record.key] = Warn.throttled.says(f"the driver throttled the device ({nvml.reasons(why)})")
    for key, share in waiting(results).items():
        if share > MOST_WAITING:
            text = f"{busy}: threads waited for a processor in {percent(share)} of the samples"
            doubts[key] = Warn.waiting_threads.says(text)
    return doubts


@lru_cache(maxsize=1)
def session_doubts(results: Results) -> list[Warned]:
    """Return the reasons to distrust every time of a session, one sentence each; empty if the times are sound.

    If the hypervisor alone took more than CONTENTION of the processors' time, that is always a reason. If only
    it and other programs together did, that is a reason only if no cell records whether threads waited, because the
    effect varies: it may be nothing with one thread, and a factor of ten with two.
    """
    lines, load, waits = list[Warned](), results.system_load, waiting(results)
    is_stolen = load is not None and load.stolen > CONTENTION
    if (busy := contention(results)) and (is_stolen or not waits):
        lines.append(busy)
    if waits and (share := statistics.mean(waits.values())) > MOST_WAITING:
        kept = f"threads waited for a processor in {percent(share)} of the samples"
        has_more = any(each.num_threads != 1 for each in results.plan.workloads)
        way_out = "--set num_threads=1" if has_more else "a quieter machine"
        text = f"Other work kept the processors busy: {kept}. Times are too long: try {way_out}."
        lines.append(Warn.waiting_threads.says(text))
    if results.num_discarded > MANY * results.num_blocks:
        counted = f"{results.num_discarded} of {results.num_blocks} blocks were discarded because of interference"
        text = f"{counted}: other work disturbed this machine too much for verdicts to be trusted."
        lines.append(Warn.discarded_blocks.says(text))
    if any(_has_changed_machine(records) for records in _by_machine(results)):
        text = "The machine changed during this run: times are not comparable."
        lines.append(Warn.machine_changed.says(text))
    return lines


def doubts(results: Results) -> list[Warned]:
    """Return the reasons to distrust every time of the session; if there are none, those to distrust some times.

    The latter are one sentence for each implementation, or implementation on a side, with doubtful times.
    """
    if lines := session_doubts(results):
        return lines
    by_arm: dict[Arm, list[tuple[str, Warned]]] = {}
    for (workload, arm), doubt in cell_doubts(results).items():
        by_arm.setdefault(arm, []).append((workload, doubt))
    lines = []
    for arm, cells in by_arm.items():
        workload, doubt = cells[0]
        where = workload + f" and {len(cells) - 1} more" * (len(cells) > 1)
        text = f"The time of {arm} on {where} is doubtful: {doubt}."
        lines.append(doubt.name.says(text))
    return lines


def doubt_of(results: Results, key: Key) -> str:
    """Return why a cell's own time is doubtful; "" if it is not. The time of its reference does not matter."""
    return "; ".join([*session_doubts(results), *filter(None, [cell_doubts(results).get(key)])])


def is_doubtful(results: Results, key: Key | None = None) -> bool:
    """Return whether the times of a cell or its reference are doubtful, so that the cell gets no verdict.

    Without a key: whether all compared cells are doubtful, which makes the session invalid. For WHOLE: whether any
    compared cell is doubtful.
    """
    if session_doubts(results):
        return True
    if key is None or key == WHOLE:
        cells = [is_doubtful(results, each) for each in session_effects(results) if each != WHOLE]
        return any(cells) if key == WHOLE else bool(cells) and all(cells)
    workload, _ = key
    return has_doubt(results, {key, (workload, reference(results, key))})


def has_doubt(results: Results, cells: AbstractSet[Key]) -> bool:
    """Return whether the time of any of these cells is doubtful."""
    return bool(session_doubts(results)) or not cell_doubts(results).keys().isdisjoint(cells)
