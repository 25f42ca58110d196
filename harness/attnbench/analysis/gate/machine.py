"""Compare the state of a machine in two runs by the ceilings that both measured.

Clocks, neighbours on a shared host and memory move times by tens of percent between two runs of the same code. A change
that affects all times alike cancels in the ratio to the reference, which both runs contain. But if matrix products have
become slower and copies have not, or the other way round, every ratio may move by that factor.
"""

import math
from dataclasses import dataclass

import msgspec

from attnbench.analysis.gate.rulings import OUTCOMES, Kind, Ruling
from attnbench.analysis.results import Results
from attnbench.statistics.verdict import Reason
from attnbench.storage.records import Ceilings
from attnbench.units import show

LEAST_CHANGE = 1.2
"""Ceilings of one machine in one state move against each other by a smaller factor. The largest observed is 1.17, for
copies in main memory shared with others."""


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """The factor by which ceilings moved against each other, with a description; 1 and "" if the state is unchanged."""

    factor: float = 1.0
    words: str = ""


def between(base: Results, candidate: Results) -> StateChange:
    """The largest state change of any device, dtype and number of threads."""
    changes = [
        _at(before, candidate.ceilings[place]) for place, before in base.ceilings.items() if place in candidate.ceilings
    ]
    found = [each for each in changes if each.factor > LEAST_CHANGE]
    return max(found, key=lambda each: each.factor, default=StateChange())


def explained(ruling: Ruling, change: StateChange) -> Ruling:
    """Make a ruling undecided if the state change of the machine explains the difference in time."""
    if not change.words or ruling.kind not in {Kind.slower, Kind.faster} or ruling.effect is None:
        return ruling
    ends = (ruling.effect, ruling.low, ruling.high)
    least = min(abs(math.log(end)) for end in ends if end is not None)
    if least > math.log(change.factor):
        return ruling
    return msgspec.structs.replace(
        ruling,
        kind=Kind.undecided,
        outcome=OUTCOMES[Kind.undecided],
        reason=Reason.machine_state,
        words=f"{ruling.words}; the machine was in another state, which explains as much ({change.words})",
    )


def _at(before: Ceilings, after: Ceilings) -> StateChange:
    """The state change at one place, from its ceilings."""
    known = _rates(before, after)
    if not known:
        return StateChange()
    ratios = {name: new / old for name, (_, old, new) in known.items()}
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    words = [
        f"the fastest {name} {show(old, unit)} before, {show(new, unit)} now"
        for name, (unit, old, new) in ((each, known[each]) for each in (least, most))
    ]
    return StateChange(factor=ratios[most] / ratios[least], words="; ".join(words))


def _rates(before: Ceilings, after: Ceilings) -> dict[str, tuple[str, float, float]]:
    """Rates that both runs measured, by name: the unit, then the old and the new rate."""
    rates = {
        "matrix product": ("flops/s", before.matmul, after.matmul),
        "copy": ("bytes/s", before.copy(0), after.copy(0)),
        "copy in main memory": ("bytes/s", before.copy(math.inf), after.copy(math.inf)),
    }
    return {name: (unit, old.rate, new.rate) for name, (unit, old, new) in rates.items() if old and new}
