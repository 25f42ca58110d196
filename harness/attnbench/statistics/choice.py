"""The fastest of several that were sampled in the same blocks, and the verdict on each other one.

The fastest is chosen by every second process, and the others are judged by the processes in between: the winner of many
owes some of its lead to luck, and only to luck in the processes that chose it. Noise in those can at worst choose
another one that is about as fast, so that a lead is rather too small than too large.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from attnbench.statistics.effects import Taken, numbers
from attnbench.statistics.intervals import Block, by_process
from attnbench.statistics.verdict import FEWEST_PROCESSES, Judgement, effect, judge
from attnbench.storage.events import Plan
from attnbench.storage.records import Arm, Verdict

CHOOSING_PROCESSES = 2 * FEWEST_PROCESSES
"""Processes that a choice needs: half of them choose, and the others judge."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The leader, and the verdict on each other one relative to it."""

    leader: str
    others: dict[str, Judgement]  # the fastest first; without those that share no process with the leader

    def verdict(self, name: str) -> Verdict:
        """Another one relative to the leader; undecided where that is not known."""
        judged = self.others.get(name)
        return Verdict.undecided if judged is None else judged.verdict

    @property
    def open(self) -> list[str]:
        """Those that more processes may decide."""
        return [name for name, judged in self.others.items() if judged.needs_more]

    @property
    def equals(self) -> list[str]:
        """Those that are not shown to be slower."""
        return [name for name in self.others if self.verdict(name) is not Verdict.slower]


def standing(
    plan: Plan,
    taken: Taken,
    arms: Iterable[Arm],
    discarded: Collection[Block] = (),
    candidates: Collection[str] | None = None,
) -> Standing | None:
    """The standing of the arms with samples; None where the baseline, with which all share blocks, has none.

    With `candidates`, only they can lead, and others are not compared.
    """
    reference = Arm(implementation=plan.baseline)
    if not len(taken.get(reference, ())):
        return None

    def by_process_of(arm: Arm, other: Arm) -> dict[int, float]:
        return by_process(numbers(taken, arm, other, discarded))

    logs = {arm: _choosing(own) for arm in arms if arm != reference and (own := by_process_of(arm, reference))} | {
        reference: 0.0
    }
    if candidates is not None:
        logs = {arm: log for arm, log in logs.items() if arm.implementation in candidates}
    if not logs:
        return None
    order = sorted(logs, key=lambda arm: (logs[arm], arm != reference))
    leader = order[0]
    effects = {
        arm.implementation: effect(judging) for arm in order[1:] if (judging := _judging(by_process_of(arm, leader)))
    }
    return Standing(leader=leader.implementation, others=judge(effects, plan.smallest_effect, plan.false_share))


def _choosing(numbers: Mapping[int, float]) -> float:
    """The mean log ratio of the processes that choose: of all while there are too few for two halves."""
    chosen = [log for epoch, log in numbers.items() if epoch % 2 == 0 or len(numbers) < CHOOSING_PROCESSES]
    return sum(chosen) / len(chosen) if chosen else sum(numbers.values()) / len(numbers)


def _judging(numbers: Mapping[int, float]) -> list[float]:
    """The log ratios of the processes that do not choose; of all while there are too few for any verdict."""
    judging = [log for epoch, log in numbers.items() if epoch % 2]
    return judging if len(numbers) >= CHOOSING_PROCESSES else [*numbers.values()][: FEWEST_PROCESSES - 1]
