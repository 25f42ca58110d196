"""Verdicts on one run: each implementation against the baseline of its workload, from pairs inside blocks."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from attnbench.analysis.cached import once
from attnbench.analysis.results import Results
from attnbench.statistics.effects import Effect, paired_effect
from attnbench.statistics.intervals import Block, Estimate, Pairs, paired_ratio, pairs, pairs_with_baseline
from attnbench.statistics.verdicts import Policy, judge, share_of_cells, visits_to_go
from attnbench.storage.events import TOUCH_BELOW_S
from attnbench.storage.records import (
    CONTROL_LATENCY,
    LATENCY,
    Arm,
    Comparison,
    Key,
    Record,
    Sample,
    Status,
    Verdict,
)
from attnbench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest implementation of a workload. Chosen by half of the visits, and its ratio read from the others."""

    workload: Workload
    implementation: str
    ratio: Estimate | None  # None: there are no other visits


@once
def comparisons(results: Results) -> list[Comparison]:
    """Every cell that has times, except the baseline's own, against the plan's baseline on the same workload."""
    plan, baselines, cells = results.plan, _baselines(results), effects(results)
    found = []
    judged = judge([effect for _, effect in cells], policy(results))
    for (record, effect), judgement in zip(cells, judged, strict=True):
        baseline, more_s = baselines[record.workload.id, plan.reference(record.arm)], math.inf
        if judgement.verdict is Verdict.undecided:
            if plan.sides is None:  # a visit takes the arm once and the baseline twice in each block
                block_s = 2 * _sample_s(_samples(baseline, LATENCY)) + _sample_s(_samples(record, LATENCY))
                visit_s = plan.num_blocks * block_s
            else:  # each process counts as one visit
                visit_s = (results.elapsed_s or math.inf) / effect.ratio.num_clusters
            more_s = visits_to_go(effect, judgement.needed) * visit_s
        found.append(
            Comparison(
                workload=record.workload,
                implementation=record.implementation,
                side=record.side,
                baseline=baseline.implementation,
                metric=LATENCY,
                ratio=effect.ratio.point,
                low=effect.ratio.low,
                high=effect.ratio.high,
                minimum_detectable_effect=judgement.detectable,
                verdict=judgement.verdict,
                sameness=effect.sameness,
                e_same=effect.e_same,
                e_apart=effect.e_apart,
                more_s=more_s if math.isfinite(more_s) else None,
            )
        )
    return found


@once
def effects(results: Results) -> list[tuple[Record, Effect]]:
    """Each cell that is compared, and what its pairs show; of two sides, each process counts as one pair."""
    cells = []
    for record, blocks, controls in paired(results):
        counted = blocks if results.plan.sides is None else blocks.by_epoch()
        effect = paired_effect(counted, paired_ratio(controls), results.plan.smallest_effect)
        if effect is not None:
            cells.append((record, effect))
    return cells


def policy(results: Results) -> Policy:
    """How the cells of a run are judged: of two sides, the whole has a part of the false verdicts to itself."""
    return Policy(false_share=share_of_cells(has_whole=results.plan.sides is not None))


@once
def noise_floors(results: Results) -> dict[str, Estimate]:
    """By workload id: the ratio of the baseline's A/A control to the baseline, identical code, which ought to be 1.

    Of several baselines the one that is worst.
    """
    floors: dict[str, Estimate] = {}
    for (workload, _), record in _baselines(results).items():
        discarded: Collection[Block] = results.discarded.get(workload, ())
        floor = paired_ratio(pairs(_samples(record, CONTROL_LATENCY), _samples(record, LATENCY), discarded))
        if floor is not None and (floor.largest_log or 0.0) >= (floors.get(workload, floor).largest_log or 0.0):
            floors[workload] = floor
    return floors


@once
def winners(results: Results) -> list[Winner]:
    """The fastest implementation of each workload that has several.

    None where two states of the code are compared. Whatever seems fastest owes part of that to luck: the ratio from the
    visits that chose it would flatter it.
    """
    by_workload: dict[str, list[tuple[Record, Pairs]]] = {}
    baselines = {} if results.plan.sides else _baselines(results)
    for record in results.records:
        baseline = baselines.get((record.workload.id, Arm(implementation=results.plan.baseline)))
        if record.status is Status.ok and baseline is not None:
            discarded: Collection[Block] = results.discarded.get(record.workload.id, ())
            controls = () if record is baseline else _samples(baseline, CONTROL_LATENCY)
            own = pairs(_samples(record, LATENCY), _samples(baseline, LATENCY), discarded, controls)
            by_workload.setdefault(record.workload.id, []).append((record, own))
    found = []
    for rows in by_workload.values():
        chosen_by = [(paired_ratio(own.of_visits(0)), record, own) for record, own in rows]
        known = [(ratio.point, record, own) for ratio, record, own in chosen_by if ratio is not None]
        if len(known) > 1:  # one alone beats nothing
            _, record, own = min(known, key=lambda row: row[0])
            ratio = paired_ratio(own.of_visits(1))
            found.append(Winner(workload=record.workload, implementation=record.implementation, ratio=ratio))
    return found


def paired(results: Results) -> Iterator[tuple[Record, Pairs, Pairs]]:
    """Each cell that has a baseline: its pairs with that, and those of the baseline and its A/A control."""
    baselines = _baselines(results)
    for record in results.records:
        baseline = baselines.get((record.workload.id, results.plan.reference(record.arm)))
        if record.status is Status.ok and baseline is not None and record is not baseline:
            discarded: Collection[Block] = results.discarded.get(record.workload.id, ())
            own, reference = _samples(record, LATENCY), _samples(baseline, LATENCY)
            own_control = None if results.plan.sides is None else _samples(record, CONTROL_LATENCY)
            control = _samples(baseline, CONTROL_LATENCY)
            yield record, *pairs_with_baseline(own, reference, control, discarded, own_control)


def _sample_s(samples: tuple[Sample, ...]) -> float:
    """What a sample takes, with the untimed call before one of short calls."""
    last = samples[-1]
    return last.value * (last.num_calls + (last.value < TOUCH_BELOW_S))


def _baselines(results: Results) -> dict[Key, Record]:
    """The ok cells that others are compared with."""
    references = (record for record in results.records if results.plan.is_reference(record.arm))
    return {record.key: record for record in references if record.status is Status.ok}


def _samples(record: Record, metric: str) -> tuple[Sample, ...]:
    found = record.measurement(metric)
    return () if found is None else found.samples
