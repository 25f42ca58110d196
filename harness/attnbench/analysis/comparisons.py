"""Verdicts on one run: each implementation against the baseline of its workload, from pairs inside blocks.

There is one for each cell, one for an implementation over all of its workloads, and one for a session with two sides.
"""

import functools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter

import numpy as np

from attnbench.analysis.results import Results
from attnbench.devices import nvml
from attnbench.statistics import evidence
from attnbench.statistics.interference import MANY
from attnbench.statistics.intervals import Estimate, Pairs, mean_of, paired_ratio, pairs, pairs_with_baseline
from attnbench.statistics.verdicts import (
    ALONE,
    CELLS,
    WHOLE,
    Effect,
    Judgement,
    Relative,
    judge,
    margin,
    mean_over_cells,
    midmeans,
    paired_effect,
    robust_spread,
    visits_to_go,
    within,
)
from attnbench.storage.records import (
    BASE,
    CONTROL_LATENCY,
    LATENCY,
    Comparison,
    Key,
    Record,
    Status,
    Verdict,
)
from attnbench.units import percent
from attnbench.workloads.workload import Workload

CONTENTION = 0.1
"""Of the time of all processors, what others and the host may take before verdicts are doubtful."""
NEAR = 1.5
"""Who takes more than so many times the fastest's time is no rival of it."""
FEWEST_CELLS = 2
"""Fewer say nothing of an implementation that their own verdicts do not say."""


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The implementation of a workload that took the least time, whether it is clear that it is the fastest, and why.

    `rivals` are those that are not clearly slower; where it is clear, the next one alone.
    """

    workload: Workload
    implementation: str
    rivals: tuple[str, ...]
    ratio: Estimate | None  # the next one's time divided by its own; None: they have no block in common
    is_clear: bool


@dataclass(frozen=True, kw_only=True)
class Compared(Relative):
    """A cell and its baseline: their pairs, of which there is one at least, and what these show."""

    record: Record
    baseline: Record
    blocks: Pairs
    counted: Pairs  # the same; where processes count (Plan.counts_processes), one for each
    controls: Pairs  # of the baseline and its A/A control
    smallest_effect: float
    is_alone: bool  # one of both is in a process of its own

    @cached_property
    def effect(self) -> Effect:
        """The ratio with the evidence for and against a difference, which takes longer to compute."""
        within = self.blocks if self.is_alone else None
        effect = paired_effect(self.counted, self.floor, self.smallest_effect, within=within)
        assert effect is not None
        return effect


@lru_cache(maxsize=1)
def compared(results: Results) -> list[Compared]:
    """Each cell that has times and a baseline."""
    plan, baselines = results.plan, _baselines(results)
    found = []
    for record in results.records:
        baseline = baselines.get((record.workload.id, plan.reference(record.arm)))
        if record.status is not Status.ok or baseline is None or record is baseline:
            continue
        by_epoch = plan.counts_processes(record.arm)
        blocks, controls = pairs_with_baseline(
            record.samples(LATENCY),
            baseline.samples(LATENCY),
            baseline.samples(CONTROL_LATENCY),
            results.discarded.get(record.workload.id, frozenset()),
            record.samples(CONTROL_LATENCY) if by_epoch else None,
        )
        counted = blocks.by_epoch() if by_epoch else blocks
        ratio = paired_ratio(counted)
        if ratio is not None:
            found.append(
                Compared(
                    record=record,
                    baseline=baseline,
                    blocks=blocks,
                    counted=counted,
                    controls=controls,
                    ratio=ratio,
                    floor=paired_ratio(controls),
                    num_epochs=len({epoch for epoch, _ in blocks.visits}),
                    smallest_effect=plan.smallest_effect,
                    is_alone=plan.is_alone(record.arm),
                )
            )
    return found


@lru_cache(maxsize=1)
def comparisons(results: Results) -> list[Comparison]:
    """Every cell that has times, except the baseline's own, against the plan's baseline on the same workload."""
    plan, cells = results.plan, compared(results)
    found = []
    judged = judge([cell.effect for cell in cells], within(ALONE if plan.sides is None else CELLS, plan.false_share))
    for cell, judgement in zip(cells, judged, strict=True):
        record, effect, more_s = cell.record, cell.effect, math.inf
        if judgement.verdict is Verdict.undecided:
            if not plan.counts_processes(record.arm):  # a visit takes the arm once and the baseline twice in each block
                block_s = 2 * cell.baseline.samples(LATENCY)[-1].called_s + record.samples(LATENCY)[-1].called_s
                visit_s = plan.num_blocks * block_s
            else:  # each process counts as one visit
                visit_s = ((results.elapsed_s or math.inf) - results.check_s) / effect.ratio.num_clusters
            more_s = visits_to_go(effect, judgement.needed) * visit_s
        known_s = more_s if math.isfinite(more_s) else None
        found.append(judgement.comparison(record.workload, record.arm, cell.baseline.implementation, known_s))
    return found


@lru_cache(maxsize=1)
def noise_floors(results: Results) -> dict[str, Estimate]:
    """By workload id: the ratio of the baseline's A/A control to the baseline, identical code, which ought to be 1.

    Of several baselines the one that is worst.
    """
    floors: dict[str, Estimate] = {}
    for (workload, _), record in _baselines(results).items():
        discarded = results.discarded.get(workload, frozenset())
        floor = paired_ratio(pairs(record.samples(CONTROL_LATENCY), record.samples(LATENCY), discarded))
        if floor is not None and (floor.largest_log or 0.0) >= (floors.get(workload, floor).largest_log or 0.0):
            floors[workload] = floor
    return floors


@lru_cache(maxsize=1)
def winners(results: Results) -> list[Winner]:
    """Who is the fastest on each workload that has several, in the order of the plan; of two sides nobody.

    It is clear where all others within `NEAR` times its time are slower: by the verdicts of the run where it or the
    other is the baseline, else by verdicts on their pairs. That each of them must be is what keeps luck out: among
    equals some arm always seems the fastest, but the next is close to it.
    """
    if results.plan.sides is not None:
        return []
    verdicts = {each.key: each.verdict for each in comparisons(results)}
    by_workload: dict[str, list[tuple[float, Record]]] = {}
    for cell in compared(results):
        members = by_workload.setdefault(cell.record.workload.id, [(1.0, cell.baseline)])
        members.append((cell.ratio.point, cell.record))
    found = []
    for members in by_workload.values():
        (least, first), *others = sorted(members, key=itemgetter(0))
        rivals = [each for ratio, each in others if ratio <= NEAR * least] or [others[0][1]]
        effects = {each.key: _apart(results, each, first) for each in rivals}
        known = {key: effect for key, effect in effects.items() if effect is not None}
        slower = {
            key: judged.verdict is Verdict.slower for key, judged in zip(known, judge([*known.values()]), strict=True)
        }
        if first.key not in verdicts:  # it is the baseline
            slower = {each.key: verdicts[each.key] is Verdict.slower for each in rivals}
        else:
            faster = verdicts[first.key] is Verdict.faster
            slower |= {each.key: faster for each in rivals if each.key not in verdicts}
        left = [each.implementation for each in rivals if not slower.get(each.key)]
        apart = effects[rivals[0].key]
        found.append(
            Winner(
                workload=first.workload,
                implementation=first.implementation,
                rivals=tuple(left or [rivals[0].implementation]),
                ratio=None if apart is None else apart.ratio,
                is_clear=not left,
            )
        )
    return found


def _apart(results: Results, record: Record, other: Record) -> Effect | None:
    """How many times longer a cell takes than another of its workload; None where no block has both."""
    plan, workload = results.plan, record.workload.id
    discarded = results.discarded.get(workload, frozenset())
    blocks = pairs(record.samples(LATENCY), other.samples(LATENCY), discarded)
    is_alone = plan.runner(record.arm) != plan.runner(other.arm)
    floor = noise_floors(results).get(workload)
    counted = blocks.by_epoch() if is_alone else blocks
    return paired_effect(counted, floor, plan.smallest_effect, within=blocks if is_alone else None)


def suite(results: Results) -> Judgement | None:
    """The verdict on all cells of a session with two sides; None where no cell has enough visits for an interval."""
    effect = whole_effect(results)
    return None if effect is None else judge([effect], within(WHOLE, results.plan.false_share))[0]


def whole_effect(results: Results) -> Effect | None:
    """What all cells of a session with two sides show together; None without any interval.

    A bet is made for each process, on all of its blocks: nothing need be found in any cell.
    """
    cells = _with_interval(results)
    logs = midmeans([cell.blocks for cell in cells])
    effect = _mean_effect(cells, evidence.last(evidence.e_values(logs))) if cells else None
    if effect is None or effect.ratio.standard_error is None:
        return None
    return replace(effect, ratio=replace(effect.ratio, num_samples=len(logs)), spread=robust_spread(logs))


@lru_cache(maxsize=1)
def by_implementation(results: Results) -> dict[str, Judgement]:
    """What each implementation's workloads say together, where it has two at least; in the order of the ratios.

    The e-value against "the same code on every workload" is the mean of the workloads' own, which is an e-value
    whatever they share. Verdicts hold among all implementations of a session, apart from those on single cells. With
    fewer than three processes there is a mean without an interval.
    """
    cells: dict[str, list[Compared]] = {}
    for cell in _with_interval(results):
        cells.setdefault(cell.record.implementation, []).append(cell)
    together = {
        name: _mean_effect(members, float(np.mean([cell.effect.e_same for cell in members])))
        for name, members in cells.items()
        if len(members) >= FEWEST_CELLS
    }
    judged = zip(together, judge(list(together.values()), within(ALONE, results.plan.false_share)), strict=True)
    return dict(sorted(judged, key=lambda item: item[1].effect.ratio.point))


def _with_interval(results: Results) -> list[Compared]:
    """The compared cells with enough visits for an interval, of two sides with enough processes."""
    return [cell for cell in compared(results) if cell.ratio.standard_error is not None]


def _mean_effect(cells: Sequence[Compared], e_same: float) -> Effect:
    """What cells show together; equivalent asks only that the interval lies within the margin."""
    mean, smallest = mean_over_cells([cell.counted for cell in cells]), cells[0].smallest_effect
    return Effect(
        ratio=mean or replace(mean_of([cell.ratio for cell in cells]), standard_error=None),
        margin=margin(mean_over_cells([cell.controls for cell in cells]), smallest),
        smallest=smallest,
        e_same=e_same,
        e_apart=math.inf,
        num_cells=len(cells),
    )


def by_side(results: Results) -> tuple[list[Record], list[Record]]:
    """The base's records and the candidate's. A cell that only one side has is in that side's list alone."""
    base = [record for record in results.records if record.side == BASE]
    return base, [record for record in results.records if record.side != BASE]


@lru_cache(maxsize=1)
def doubts(results: Results) -> list[str]:
    """Why the verdicts of a session may be wrong, though they are what its times say; a sentence each."""
    lines, load = [], results.system_load
    is_timed = any(results.num_visits.values())
    if is_timed and load is not None and load.others + load.stolen > CONTENTION:
        taken = f"other processes had {percent(load.others)} of the processors' time, and the host took"
        lines.append(f"High CPU contention during the run: {taken} {percent(load.stolen)}. Times may be too long.")
    if results.num_discarded > MANY * results.num_blocks:
        counted = f"{results.num_discarded} of {results.num_blocks} blocks were discarded because of interference"
        lines.append(f"{counted}: other work disturbed this machine too much for verdicts to be trusted.")
    by_host = [[each for each in results.records if each.host == host] for host in results.hosts]
    parts = by_side(results) if results.plan.sides is not None else by_host or (results.records,)
    found = [{each.environment.fingerprint for each in part if each.environment is not None} for part in parts]
    if any(len(fingerprints) > 1 for fingerprints in found):  # two sides may have one each
        lines.append("The machine changed during this run: times are not comparable.")
    num_doubtful = Counter(arm for _, arm in results.doubts)
    for (workload, arm), doubt in results.doubts.items():
        if others := num_doubtful.pop(arm, 0):  # each implementation once
            where = workload + f" and {others - 1} more" * (others > 1)
            lines.append(f"The time of {arm} on {where} is doubtful, as other work kept the machine busy: {doubt}.")
    said, is_usual = throttled(results)
    return lines if is_usual else [*lines, said]


def throttled(results: Results) -> tuple[str, bool]:
    """What throttled the device during comparisons, a sentence or ""; and whether that makes no verdict doubtful.

    A power cap is the usual state of a GPU that works hard.
    """
    active = {name: found.throttled_by for name, found in results.devices.items() if found.throttled_by}
    workloads = [each.workload.id for each in comparisons(results)] if active else []
    during = [active[name] for name in workloads if name in active]
    if not during:
        return "", True
    why = functools.reduce(operator.or_, during)
    counted = f"during {len(during)} of {len(workloads)} comparisons ({nvml.reasons(why)})"
    said = f"The driver throttled the device {counted}: times are those of a slower clock, and who needs more power may"
    return f"{said} lose more.", not why & ~nvml.POWER_CAP


def losses(results: Results) -> list[str]:
    """What the candidate did worse than is allowed whatever its speed: who is gone, wrong or failed, a line each."""
    sides = results.plan.sides
    assert sides is not None
    return [f"lost: {name}: {reason}" for name, reason in sides.lost.items()] + [line for _, line in failed(results)]


def failed(results: Results) -> list[tuple[Record, str]]:
    """Of two sides the cells that are gone, wrong or failed on the candidate's, each with what is said of it."""
    base, candidate = by_side(results)
    before = {(record.workload.id, record.implementation): record.status for record in base}
    found = []
    for record in candidate:
        was = before.get((record.workload.id, record.implementation))
        is_gone = was is Status.ok and record.status is not Status.ok and not record.is_predicted
        if record.is_finding or is_gone:
            before_it = "" if was is None else f" (the base: {was})"
            where = f"{record.implementation} on {record.workload.id}"
            found.append((record, f"{record.status}: {where}{before_it}: {record.message}"))
    return found


def untried(results: Results) -> list[str]:
    """The cells that one of two sides has and the other was predicted not to reach, a line each: nothing is known."""
    one, other = ({(each.workload.id, each.implementation): each for each in side} for side in by_side(results))
    return [
        f"not tried: {record.arm} on {record.workload.id}: {record.message}"
        for mine, its in ((one, other), (other, one))
        for key, record in mine.items()
        if record.is_predicted and key in its and its[key].status is Status.ok
    ]


def _baselines(results: Results) -> dict[Key, Record]:
    """The ok cells that others are compared with."""
    references = (record for record in results.records if results.plan.is_reference(record.arm))
    return {record.key: record for record in references if record.status is Status.ok}
