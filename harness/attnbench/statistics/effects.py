"""Compute the effects of a run (log ratios of an arm's time to its reference's), and judge them together.

An arm is an implementation that takes part in a block, which samples each arm once. A visit consists of a few blocks of
one workload in one process.
"""

from collections.abc import Collection, Mapping, Sequence

from attnbench.statistics.intervals import Block, Visit, by_process, effect_of, visit_numbers
from attnbench.statistics.verdict import Effect, Judgement, effect, judge
from attnbench.storage.events import Plan
from attnbench.storage.records import Arm, Key, Sample

WHOLE: Key = ("*", Arm())  # key of the effect of all cells together, in a session that compares two sides
Taken = Mapping[Arm, Sequence[Sample]]  # the samples of one workload by arm
Numbers = dict[Key, dict[Visit, float]]  # the log ratios of each comparison, one for each visit


def numbers(taken: Taken, arm: Arm, reference: Arm, discarded: Collection[Block] = ()) -> dict[Visit, float]:
    """Return the log ratio of the time of `arm` to that of `reference` for each visit (a short series of blocks).

    See `intervals.visit_numbers`.
    """
    return visit_numbers(taken.get(arm, ()), taken.get(reference, ()), discarded)


def run_numbers(
    samples: Mapping[str, Taken],
    references: Mapping[str, Mapping[Arm, Arm]],
    discarded: Mapping[str, Collection[Block]] | None = None,
) -> Numbers:
    """Return the log ratio of the time of each arm to that of its reference, by workload and arm, for each visit.

    A visit (a short series of blocks in one process) counts if it has a block that sampled both arms and is not
    discarded. All arguments are keyed by workload; `references` maps each arm to its reference.
    """
    logs = Numbers()
    for workload, pairs in references.items():
        taken, out = samples.get(workload, {}), (discarded or {}).get(workload, ())
        for arm, reference in pairs.items():
            if arm != reference and (visits := numbers(taken, arm, reference, out)):
                logs[workload, arm] = visits
    return logs


def effects(plan: Plan, logs: Numbers) -> dict[Key, Effect]:
    """Compute the effect (log ratio of times) of each comparison, by key.

    If the plan compares two states of the code, WHOLE has the mean of all cells.
    """
    known = {key: effect_of(visits) for key, visits in logs.items()}
    if plan.sides is None or not logs:
        return known
    cells = [by_process(visits) for visits in logs.values()]
    if shared := set.intersection(*map(set, cells)):  # only processes that timed all cells, for comparable means

        def mean(epoch: int) -> float:
            return sum(cell[epoch] for cell in cells) / len(cells)

        known[WHOLE] = effect(list(map(mean, sorted(shared))))
    return known


def judge_effects(plan: Plan, known: Mapping[Key, Effect]) -> dict[Key, Judgement]:
    """Judge all effects of a run together; `judge` expects differences unless the plan compares two sides."""
    cells = {key: each for key, each in known.items() if key != WHOLE}
    counted = cells if len(cells) == 1 else known  # with a single cell, WHOLE is the same comparison
    found = judge(counted, plan.smallest_effect, plan.false_share, expects_differences=plan.sides is None)
    return {key: found.get(key) or found[next(iter(cells))] for key in known}
