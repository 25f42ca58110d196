"""How the machines of two runs differ, or the state of one, by the ceilings that both measured.

Clocks, neighbours on a shared host and memory move times by tens of percent between two runs of the same code. What
moves all times alike moves no ratio to the reference, which is the control of both runs. But where products have become
slower and copies have not, or the other way round, every ratio may move by as much.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from attnbench.analysis.gate.certain import key_of
from attnbench.analysis.gate.rulings import OUTCOMES, Kind, Ruling
from attnbench.analysis.results import Results
from attnbench.statistics.intervals import median
from attnbench.statistics.samples import Samples
from attnbench.statistics.verdict import Reason
from attnbench.storage.records import LATENCY, Ceilings, Environment, Record
from attnbench.units import MISSING, show

LEAST_CHANGE = 1.2
"""Ceilings of one machine in one state move against each other by less, as a factor: 1.17 was seen, by copies in main
memory that is shared with others."""


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """By which factor ceilings have moved against each other, and which; 1 and no words where the state is the same."""

    factor: float = 1.0
    words: str = ""


def between(base: Results, candidate: Results) -> StateChange:
    """The largest such factor of any device, dtype and number of threads."""
    changes = [
        _at(before, candidate.ceilings[place]) for place, before in base.ceilings.items() if place in candidate.ceilings
    ]
    found = [each for each in changes if each.factor > LEAST_CHANGE]
    return max(found, key=lambda each: each.factor, default=StateChange())


def explained(ruling: Ruling, change: StateChange) -> Ruling:
    """The same, or undecided where a time differs by no more than the state of the machine explains."""
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


def differences(base: Results, candidate: Results) -> list[str]:
    """Of runs on two machines: what differs, and how fast the candidate's is, by ceilings and by the reference."""
    before, after = (
        {name: text for each in results.environments.values() for name, text in _facts(each)}
        for results in (base, candidate)
    )
    differ = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    named = [f"{name} ({before.get(name, MISSING)} and {after.get(name, MISSING)})" for name in differ]
    lines = [f"the machines differ in {', '.join(named)}"] if named else []
    for place, ceilings in base.ceilings.items():
        if place in candidate.ceilings and (rates := _rates(ceilings, candidate.ceilings[place])):
            reached = ", ".join(f"{new / old:.2f} times the {name}" for name, (_, old, new) in rates.items())
            lines.append(f"in {place[1]} on {place[0]}, the candidate's machine reaches {reached}")
    one, other = ({key_of(record): _latency_s(record) for record in results.records} for results in (base, candidate))
    ratios = [
        other[key] / own_s for key, own_s in one.items() if key[1] == base.plan.baseline and own_s and other.get(key)
    ]
    if ratios:
        plural = "s" if len(ratios) > 1 else ""
        times = f"{min(ratios):.2f} to {max(ratios):.2f} times as long, over {len(ratios)} workload{plural}"
        lines.append(f"a call of {base.plan.baseline} takes {times}")
    return lines


def _facts(environment: Environment) -> Iterator[tuple[str, str]]:
    """What makes up the fingerprint, each under its name."""
    for name, value in environment.must_match().items():
        if isinstance(value, dict):
            yield from value.items()
        elif name == "memory_bytes":
            yield "memory", show(value, "bytes")
        else:
            yield name.removeprefix("num_").replace("_", " "), str(value)


def _latency_s(record: Record) -> float:
    """The median time of a call; 0 where it has none."""
    samples = record.samples(LATENCY)
    return median(Samples.of(samples).value) if samples else 0.0


def _at(before: Ceilings, after: Ceilings) -> StateChange:
    """What the ceilings of one place show."""
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
    """What both measured, by name: the unit, and the rate of either."""
    rates = {
        "matrix product": ("flops/s", before.matmul, after.matmul),
        "copy": ("bytes/s", before.copy(0), after.copy(0)),
        "copy in main memory": ("bytes/s", before.copy(math.inf), after.copy(math.inf)),
    }
    return {name: (unit, old.rate, new.rate) for name, (unit, old, new) in rates.items() if old and new}
