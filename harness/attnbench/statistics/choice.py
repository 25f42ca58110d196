"""The fastest of several that were sampled in the same blocks, and the verdict on each other one.

The fastest is chosen by every second process, and the others are judged by the processes in between: the winner of many
owes some of its lead to luck, and only to luck in the processes that chose it. Noise in those can at worst choose
another one that is about as fast, so that a lead is rather too small than too large.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from attnbench.statistics.intervals import Block, by_process, visit_numbers
from attnbench.statistics.verdict import FEWEST_PROCESSES, Judgement, effect, judge
from attnbench.storage.records import FALSE_SHARE, Sample, Verdict
from attnbench.workloads.sweep import SMALLEST_EFFECT


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
        """Those of whom more processes would show more."""
        return [name for name, judged in self.others.items() if judged.needs_more]

    @property
    def equals(self) -> list[str]:
        """Those that are not shown to be slower."""
        return [name for name in self.others if self.verdict(name) is not Verdict.slower]


def standing(  # noqa: PLR0913 - all but the first two have defaults that serve
    samples: Mapping[str, Sequence[Sample]],
    reference: str,
    *,
    control: Sequence[Sample] = (),
    discarded: Collection[Block] = (),
    smallest: float = SMALLEST_EFFECT,
    error: float = FALSE_SHARE,
    candidates: Collection[str] | None = None,
) -> Standing | None:
    """The standing of those with samples; None where the reference, with which all share blocks, has none.

    With `candidates`, only they can lead, and others are not compared.
    """
    if not samples.get(reference):
        return None

    def numbers(name: str, other: str) -> dict[int, float]:
        others = [samples[other], control] if other == reference and len(control) else [samples[other]]
        return by_process(visit_numbers([samples[name]], others, discarded))

    logs = {
        name: _choosing(own)
        for name in samples
        if name != reference and len(samples[name]) and (own := numbers(name, reference))
    } | {reference: 0.0}
    if candidates is not None:
        logs = {name: log for name, log in logs.items() if name in candidates}
    if not logs:
        return None
    order = sorted(logs, key=lambda name: (logs[name], name != reference))
    leader = order[0]
    effects = {name: effect(judging) for name in order[1:] if (judging := _judging(numbers(name, leader)))}
    return Standing(leader=leader, others=judge(effects, smallest, error))


def _choosing(numbers: Mapping[int, float]) -> float:
    """The mean log ratio of the processes that choose: of all while there are too few for two halves."""
    chosen = [log for epoch, log in numbers.items() if epoch % 2 == 0 or len(numbers) < 2 * FEWEST_PROCESSES]
    return sum(chosen) / len(chosen) if chosen else sum(numbers.values()) / len(numbers)


def _judging(numbers: Mapping[int, float]) -> list[float]:
    """The log ratios of the processes that do not choose; of all while there are too few for any verdict."""
    judging = [log for epoch, log in numbers.items() if epoch % 2]
    return judging if len(numbers) >= 2 * FEWEST_PROCESSES else [*numbers.values()][: FEWEST_PROCESSES - 1]
