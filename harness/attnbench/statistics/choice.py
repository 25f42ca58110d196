"""Choose the fastest of several arms that were sampled in the same blocks, and judge every other arm against it.

An arm is an implementation that takes part in a block, which samples each arm once. Even-numbered processes choose the
fastest arm, and odd-numbered processes judge the other arms. If the same processes chose and judged, the lead of the
chosen arm would include their luck. Noise in the choice can at worst select another arm that is about as fast, so a
lead is underestimated rather than overestimated.
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
    """The leader (the fastest arm, or implementation), and the judgement of each other arm relative to the leader."""

    leader: str  # name of an implementation, like `reference` and the keys of `others`
    reference: str  # the baseline or, if it has no samples, the first arm that has some
    others: dict[str, Judgement]  # fastest first; an arm that shares no judging process with the leader is missing

    @property
    def open(self) -> list[str]:
        """The names of the arms whose verdict is undecided and may change with more processes, fastest first."""
        return [name for name, judged in self.others.items() if judged.needs_more]


def standing(
    plan: Plan,
    taken: Taken,
    arms: Iterable[Arm],
    discarded: Collection[Block] = (),
    candidates: Collection[str] | None = None,
) -> Standing | None:
    """Choose the fastest of several arms (implementations), the leader; judge every other arm against the leader.

    Only arms that were sampled in the same blocks as the reference take part. The reference is the baseline or, if it
    has no samples, the first of `arms` that has some. `taken` has the samples of one workload, by arm. Blocks in
    `discarded` are ignored. `candidates` has the names of the implementations to compare (None: all). The result is
    None if none of them can be compared.
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
    """Split log ratios by process: those of even-numbered processes choose the leader, those of odd ones judge.

    With fewer than CHOOSING_PROCESSES processes, all of them choose, and the first three also judge. Such a judgement
    is biased, so it uses only three numbers: enough for an estimate, too few for a verdict.
    """
    every = [*numbers.values()]
    if len(every) < CHOOSING_PROCESSES:
        return every, every[: FEWEST_PROCESSES - 1]
    even = [log for epoch, log in numbers.items() if epoch % 2 == 0]
    return even or every, [log for epoch, log in numbers.items() if epoch % 2]
