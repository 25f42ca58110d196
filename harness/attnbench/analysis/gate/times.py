"""Rulings on times: a judgement with its allowed growth, the state of the machine, and implausible speedups.

Clocks, neighbours on a shared host and memory move times by tens of percent between two runs of the same code. A change
that affects all times alike cancels in the ratio to the reference, which both runs contain. But if matrix products have
become slower and copies have not, or the other way round, every ratio may move by that factor.
"""

import math
from dataclasses import dataclass

import msgspec

from attnbench.analysis.gate.certain import Match, tried
from attnbench.analysis.gate.rulings import ALLOWED, OUTCOMES, Kind, Outcome, Ruling
from attnbench.analysis.results import Results
from attnbench.statistics.verdict import FEWEST_PROCESSES, Judgement, Reason
from attnbench.storage.records import Ceilings
from attnbench.units import percent, show

FARTHEST = 9.0
"""Larger relative differences are not shown as percents."""
SUSPICIOUS = 0.30
"""A larger saving of time needs a whole check to be accepted: code that computes less is faster too."""
WHOLE_CHECK = ("normal", "needles", "large", "equal")
"""Probes of a whole check (checking/probes.py). A workload on which one of them shows nothing is checked with fewer."""
LEAST_CHANGE = 1.2
"""Ceilings of one machine in one state move against each other by a smaller factor. The largest observed is 1.17, for
copies in main memory shared with others."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The growth that one time may have."""

    allowed: float  # relative
    is_asked: bool = False  # by a rule of the file, not by a default
    least: float = 0.0  # relative difference that two machines explain
    see: float | None = None  # of two runs, which cannot show equality: the slowdown that must be detectable


def decided(judged: Judgement, limit: Limit) -> tuple[Kind, Reason | None, str]:
    """Classify a change in time: its kind, the reason if it is undecided, and a description."""
    change, low, high, allowed = _change(judged), judged.low, judged.high, limit.allowed
    if low is None or high is None:
        if allowed == math.inf:
            return Kind.same, None, f"{change}; any growth is allowed"
        measured = f"measured in {processes(judged.effect.num_measured)}; a gate judges from {FEWEST_PROCESSES}"
        where = "" if limit.see is None else " in each run"
        return Kind.undecided, Reason.few_processes, f"{measured}{where} on: give --rounds {FEWEST_PROCESSES}"
    usual = max(limit.least, min(allowed, ALLOWED["latency"]))  # rules that allow growth must not hide improvements
    if high < 1 and judged.ratio < 1 / (1 + usual):
        return Kind.faster, None, f"faster: {change}"
    if allowed == math.inf:
        return Kind.same, None, f"{change}; any growth is allowed"
    if low > 1 and judged.ratio > 1 + allowed:
        return Kind.slower, None, f"slower: {change}; allowed is {percent(allowed)}"
    if high <= 1 + allowed:
        is_equal = low >= 1 / (1 + allowed) and not limit.is_asked
        return Kind.same, None, f"equal within {percent(allowed)}: {change}" if is_equal else f"no slower: {change}"
    if limit.is_asked:
        why = f"a growth of up to {100 * (high - 1):.1f} % cannot be ruled out; measure longer, or raise it"
        return Kind.undecided, Reason.threshold, f"{change}: a threshold of {percent(allowed)} cannot be judged: {why}"
    detectable = math.inf if judged.detectable is None else judged.detectable
    visible = f"differences above {reach(detectable)} would show"
    if limit.see is not None and low <= 1 and detectable <= limit.see:
        return Kind.same, None, f"no slower: {change}; {visible}"
    more = "" if limit.see is None else "; run with more --rounds"
    return Kind.undecided, Reason.imprecise, f"undecided: {change}; {visible}{more}"


def reach(smallest: float) -> str:
    """The smallest detectable slowdown, in words."""
    return percent(smallest) if smallest < FARTHEST else f"{FARTHEST + 1:g} times the time"


def processes(number: int) -> str:
    """A number of processes, in words."""
    return "1 process" if number == 1 else f"{number} processes"


def _change(judged: Judgement) -> str:
    """A ratio as a change with its interval: "+5.2 % (+3.0 to +7.5)"."""
    point, low, high = (
        None if end is None else f"{100 * (end - 1):+.1f}" for end in (judged.ratio, judged.low, judged.high)
    )
    return f"{point} %" + ("" if low is None else f" ({low} to {high})")


def suspected(ruling: Ruling, match: Match) -> Ruling:
    """Turn an implausible speedup into a finding, unless the candidate's own check was whole."""
    if ruling.kind is not Kind.faster or ruling.effect is None or ruling.effect >= 1 - SUSPICIOUS:
        return ruling
    base, candidate = (None if record is None else record.agreement for record in (match.base, match.candidate))
    if candidate is not None and candidate.agrees:
        probes, before = {probe.probe for probe in candidate.probes}, tried(base)
        is_like_base = before and before <= tried(candidate) and len(probes) > 1
        if set(WHOLE_CHECK) <= probes or is_like_base:
            words = f"{ruling.words}; more than {100 * SUSPICIOUS:g} %, and its check in this run was whole"
            return msgspec.structs.replace(ruling, words=words)
    words = f"{ruling.words}: too good to be accepted without a check of its own; run it with its check"
    return msgspec.structs.replace(ruling, kind=Kind.suspicious, outcome=Outcome.finding, words=words)


def state_change(base: Results, candidate: Results) -> tuple[float, str]:
    """The largest change of one ceiling relative to another on one machine, and a description; 1 and "" if none."""
    if list(base.environments) != list(candidate.environments):
        return 1.0, ""
    places = base.ceilings.keys() & candidate.ceilings.keys()
    return max((_moved(base.ceilings[place], candidate.ceilings[place]) for place in places), default=(1.0, ""))


def _moved(before: Ceilings, after: Ceilings) -> tuple[float, str]:
    """The largest change of one ceiling relative to another at one place, with a description."""
    rates = {
        "matrix product": ("flops/s", before.matmul, after.matmul),
        "copy": ("bytes/s", before.copy(0), after.copy(0)),
        "copy in main memory": ("bytes/s", before.copy(math.inf), after.copy(math.inf)),
    }
    known = [
        (new.rate / old.rate, f"the fastest {name} {show(old.rate, unit)} before, {show(new.rate, unit)} now")
        for name, (unit, old, new) in rates.items()
        if old and new
    ]
    if not known:
        return 1.0, ""
    (least, slower), (most, faster) = min(known), max(known)
    factor = most / least
    return (factor, f"{slower}; {faster}") if factor > LEAST_CHANGE else (1.0, "")


def explained(ruling: Ruling, change: tuple[float, str]) -> Ruling:
    """Make a ruling undecided if the state change of the machine explains the difference in time."""
    factor, description = change
    if not description or ruling.kind not in {Kind.slower, Kind.faster} or ruling.effect is None:
        return ruling
    ends = (ruling.effect, ruling.low, ruling.high)
    if min(abs(math.log(end)) for end in ends if end is not None) > math.log(factor):
        return ruling
    words = f"{ruling.words}; the machine was in another state, which explains as much ({description})"
    return undecided(ruling, words, Reason.machine_state)


def undecided(ruling: Ruling, words: str, reason: Reason | None) -> Ruling:
    """Make a ruling undecided, with a reason."""
    kind = Kind.undecided
    return msgspec.structs.replace(ruling, kind=kind, outcome=OUTCOMES[kind], reason=reason, words=words)
