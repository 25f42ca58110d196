"""The fastest of several arms sampled in the same blocks, and the verdict on each other one.

Even-numbered processes choose the fastest arm, and odd-numbered ones judge the others, because the winner of many owes
some of its lead to luck in the processes that chose it. Noise in the choosing processes can at worst choose another arm
that is about as fast, so a lead is underestimated rather than overestimated.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from attnbench.statistics.effects import Taken, numbers
from attnbench.statistics.intervals import Block, by_process
from attnbench.statistics.verdict import FEWEST_PROCESSES, Judgement, effect, judge
from attnbench.storage.events import Plan
from attnbench.storage.records import Arm

CHOOSING_PROCESSES = 2 * FEWEST_PROCESSES  # processes that a choice needs: half choose, half judge


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The leader, and the verdict on each other arm relative to it."""

    leader: str  # an implementation, as the other two name them
    reference: str  # the baseline, or the first arm with samples if the baseline has none; shares blocks with all arms
    others: dict[str, Judgement]  # fastest first; an arm that shares no judging process with the leader is missing

    @property
    def open(self) -> list[str]:
        """The names of the arms whose undecided verdict more processes may decide, fastest first."""
        return [name for name, judged in self.others.items() if judged.needs_more]


def standing(
    plan: Plan,
    taken: Taken,
    arms: Iterable[Arm],
    discarded: Collection[Block] = (),
    candidates: Collection[str] | None = None,
) -> Standing | None:
    """Choose the leader among the reference and the arms that share blocks with it, and judge the others against it.

    `taken` holds the samples of one workload, by arm. `discarded` blocks are ignored. `candidates`, names of
    implementations, restricts the comparison to these; the result is None if none of them can be compared.
    """
    baseline = Arm(implementation=plan.baseline)
    reference = next((arm for arm in (baseline, *arms) if len(taken.get(arm, ()))), baseline)

    def by_process_of(arm: Arm, other: Arm) -> dict[int, float]:
        return by_process(numbers(taken, arm, other, discarded))

    logs = {reference: 0.0}
    for arm in arms:
        if arm != reference and (shared := by_process_of(arm, reference)):
            chosen, _ = _parts(shared)
            logs[arm] = sum(chosen) / len(chosen)
    if candidates is not None:
        logs = {arm: log for arm, log in logs.items() if arm.implementation in candidates}
    if not logs:
        return None
    leader, *rest = sorted(logs, key=lambda arm: (logs[arm], arm != reference))
    judging = {arm.implementation: _parts(by_process_of(arm, leader))[1] for arm in rest}
    effects = {name: effect(numbers) for name, numbers in judging.items() if numbers}
    others = judge(effects, plan.smallest_effect, plan.false_share)
    return Standing(leader=leader.implementation, reference=reference.implementation, others=others)


def _parts(numbers: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """The log ratios of the even processes, which choose, and of the odd ones, which judge.

    With fewer than eight processes, all choose. A verdict from the same processes would be biased, so only the first
    three judge, which are enough for an estimate but too few for a verdict.
    """
    every = [*numbers.values()]
    if len(every) < CHOOSING_PROCESSES:
        return every, every[: FEWEST_PROCESSES - 1]
    even = [log for epoch, log in numbers.items() if epoch % 2 == 0]
    return even or every, [log for epoch, log in numbers.items() if epoch % 2]
