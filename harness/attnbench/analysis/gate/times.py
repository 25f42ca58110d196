"""Rulings on times: compare each judgement with the growth that is allowed.

Times of the same code differ by tens of percent between two runs, because of clock speeds, other work on a shared host,
and memory. A change that affects all times alike cancels in the ratio to the reference, which both runs measure.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from attnbench.analysis.gate.rulings import ALLOWED, EVERYTHING, Key, Kind, Ruling, Side, Thresholds, ruling
from attnbench.analysis.results import Results
from attnbench.analysis.sides import Match
from attnbench.statistics.intervals import median_estimate
from attnbench.statistics.verdict import FEWEST_PROCESSES, Judgement, Reason
from attnbench.storage.records import LATENCY, Ceilings
from attnbench.units import percent

FARTHEST = 9.0  # larger relative differences are not shown as percents
LARGEST_MARGIN = 1e6  # stands for infinity: any growth is allowed
LEAST_CHANGE = 1.2
"""The state of a machine counts as changed if the ratio of two of its ceilings (highest rates) changes by at least this
factor. On unchanged machines, factors of up to 1.17 were observed, for copies in memory while other work used it."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two states of the code with their matched cells and judgements, from which the rulings are derived."""

    base: Side
    candidate: Side
    matches: Sequence[Match]
    judged: Mapping[Key, Judgement]  # candidate's time / base's, by cell; with two sides, also over all cells
    reference: str = ""  # times of two runs are relative to this implementation, which is not judged itself
    see: float | None = None  # for two runs: an unclear time passes if a slowdown of this size would have been detected
    has_same_inputs: bool = True
    notes: Sequence[str] = ()
    invalid: Sequence[str] = ()  # reasons why no time counts
    doubtful: Sequence[str] = ()  # reasons to distrust some times
    is_cut_short: bool = False
    way_out: str = ""  # advice if too few times can be judged: what to run again, and how


def is_timed(match: Match) -> bool:
    """Return whether a cell is ok on both sides and was timed in the base."""
    return match.is_ok and match.records[0].measurement(LATENCY) is not None


def on_cell(match: Match, pair: Pair, thresholds: Thresholds) -> Iterator[Ruling]:
    """Yield the ruling on the time of a cell; nothing for `Pair.reference`, or if `is_timed` is false."""
    if not is_timed(match):
        return
    samples = {side: record.samples(LATENCY) for side, record in zip(("base", "candidate"), match.records, strict=True)}
    seconds = {side: median_estimate(taken).point for side, taken in samples.items() if taken}
    if (judged := pair.judged.get(match.key)) is not None:
        one = _judged(match.key, judged, thresholds.limit([match.key], LATENCY), pair)
        yield _withdrawn(msgspec.structs.replace(one, unit="s", **seconds), judged, pair)
    elif not samples["candidate"]:
        yield ruling(match.key, LATENCY, Kind.lost, "its time is no longer measured", unit="s", **seconds)
    elif match.key[1] != pair.reference:
        reference = f"{pair.reference} in both runs" if pair.reference else "the base"
        words = f"cannot be compared: it was not measured in the same blocks as {reference}"
        yield ruling(match.key, LATENCY, Kind.undecided, words, unit="s", **seconds)


def on_suite(pair: Pair, thresholds: Thresholds) -> Ruling | None:
    """Rule on the time of all cells together, in a session with two sides.

    The allowed growth is that of the strictest rule on any cell; if some cell has no rule, it is the margin. The result
    is None if there is no judgement of all cells together, as for two runs.
    """
    judged = pair.judged.get(EVERYTHING)
    if judged is None:
        return None
    allowed = thresholds.limit([key for key in pair.judged if key != EVERYTHING], LATENCY)
    return _withdrawn(_judged(EVERYTHING, judged, allowed, pair), judged, pair)


def _judged(key: Key, judged: Judgement, allowed: float | None, pair: Pair) -> Ruling:
    """Rule on a time, which may grow by the fraction `allowed` or, if `allowed` is None, by the judgement's margin."""
    limited = judged if allowed is None else replace(judged, margin=min(allowed, LARGEST_MARGIN))
    kind, reason, words = decided(limited, is_asked=allowed is not None, see=pair.see)
    ends = {"effect": judged.ratio, "low": judged.low, "high": judged.high, "smallest": limited.detectable}
    return ruling(key, LATENCY, kind, words, reason=reason, **ends)


def decided(judged: Judgement, *, is_asked: bool = False, see: float | None = None) -> tuple[Kind, Reason | None, str]:
    """Classify a change in time against its margin; return its kind, the reason if it is undecided, and a description.

    `is_asked` is true if the margin comes from a rule in the user's file of thresholds. `see` is as in `Pair`.
    """
    low, high, allowed = judged.low, judged.high, judged.margin
    change = f"{100 * (judged.ratio - 1):+.1f} %"  # "+5.2 % (+3.0 to +7.5)"
    change += "" if low is None or high is None else f" ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})"
    unlimited = Kind.same, None, f"{change}; any growth is allowed"
    if low is None or high is None:
        if allowed >= LARGEST_MARGIN:
            return unlimited
        measured = f"measured in {processes(judged.effect.num_measured)}; a gate needs at least {FEWEST_PROCESSES}"
        return Kind.undecided, Reason.few_processes, f"{measured}: give --rounds {FEWEST_PROCESSES} or more"
    usual = min(allowed, ALLOWED[LATENCY])  # rules that allow growth must not hide improvements
    if high < 1 and judged.ratio < 1 / (1 + usual):
        return Kind.faster, None, f"faster: {change}"
    if allowed >= LARGEST_MARGIN:
        return unlimited
    if low > 1 and judged.ratio > 1 + allowed:
        return Kind.slower, None, f"slower: {change}; allowed is {percent(allowed)}"
    if high <= 1 + allowed:
        return Kind.same, None, f"no slower: {change}; allowed is {percent(allowed)}"
    if is_asked:
        why = f"a growth of up to {100 * (high - 1):.1f} % cannot be ruled out: measure longer or raise the threshold"
        words = f"{change}; a threshold of {percent(allowed)} cannot be judged, because {why}"
        return Kind.undecided, Reason.threshold, words
    detectable = math.inf if judged.detectable is None else judged.detectable
    smallest = percent(detectable) if detectable < FARTHEST else f"a factor of {FARTHEST + 1:g}"
    words = f"{change}; differences above {smallest} can be detected"
    if see is not None and low <= 1 and detectable <= see:
        return Kind.same, None, f"no slower: {words}"
    return Kind.undecided, Reason.imprecise, f"undecided: {words}"


def processes(number: int) -> str:
    """Format a number of processes: "1 process", "4 processes"."""
    return "1 process" if number == 1 else f"{number} processes"


def _withdrawn(one: Ruling, judged: Judgement, pair: Pair) -> Ruling:
    """Return the ruling, changed to undecided if its times cannot be trusted."""
    if not pair.invalid and not judged.is_doubtful:
        return one
    why = "the session is not valid" if pair.invalid else "its times are doubtful"
    return msgspec.structs.replace(one, kind=Kind.undecided, words=f"not judged, since {why}; seen: {one.words}")


def state_change(base: Results, candidate: Results) -> str:
    """Describe the largest change in a ratio of two ceilings between the runs; "" if its factor is below LEAST_CHANGE.

    Ceilings are the highest rates of matrix products, of copies, and of copies in memory. If such a ratio changes,
    ratios of times may change by the same factor.
    """
    changes = [(LEAST_CHANGE, "")]
    for place in base.ceilings.keys() & candidate.ceilings.keys():
        before, after = _rates(base.ceilings[place]), _rates(candidate.ceilings[place])
        moved = sorted((after[name] / before[name], name) for name in before.keys() & after.keys())
        if moved:
            (least, slower), (most, faster) = moved[0], moved[-1]
            words = f"compared with the base, the fastest {slower} has {least:.2f} of its rate, the fastest {faster}"
            changes.append((most / least, f"{words} {most:.2f}"))
    return max(changes)[1]


def _rates(ceilings: Ceilings) -> dict[str, float]:
    """Return the highest rate of each kind of load, in FLOP/s or bytes/s; kinds without a rate are left out."""
    known = {"matrix product": ceilings.matmul, "copy": ceilings.copy(0), "copy in memory": ceilings.copy(math.inf)}
    return {name: ceiling.rate for name, ceiling in known.items() if ceiling is not None}
