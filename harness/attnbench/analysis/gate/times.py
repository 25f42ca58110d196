"""Rulings on times, which have noise: between two separate runs, or between the two sides of one session.

Both build effects and let `statistics.verdicts.judge` decide. The words of a judgement are made here, too.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from attnbench.analysis.comparisons import paired
from attnbench.analysis.gate.cells import Match, key_of
from attnbench.analysis.gate.certain import tried
from attnbench.analysis.gate.rulings import EVERY, LATENCY, Key, Kind, Outcome, Ruling, ruling
from attnbench.analysis.gate.thresholds import ALLOWED, Thresholds
from attnbench.analysis.overall import WHOLE
from attnbench.analysis.results import Results
from attnbench.statistics.effects import Effect, Relative, effect_between_runs, mean_between_runs
from attnbench.statistics.intervals import Estimate, median_estimate, paired_ratio
from attnbench.statistics.verdicts import Judgement, Policy, Reason, judge
from attnbench.storage.records import Record, Status, Verdict
from attnbench.units import percent

KINDS = {
    Verdict.faster: Kind.faster,
    Verdict.slower: Kind.slower,
    Verdict.equivalent: Kind.same,
    Verdict.undecided: Kind.undecided,
}
Values = tuple[float | None, float | None, str]
"""What is shown of base and candidate, and its unit."""
Compared = tuple[Match, Effect, Values]
EVERYTHING = (EVERY, EVERY)
FARTHEST = 9.0
"""Larger differences are not shown as percents."""
WHOLE_CHECK = ("normal", "needles", "large", "equal")
"""The probes of a whole check (checking/reference.py); a workload on which one says nothing tries fewer."""


def relatives(results: Results) -> dict[Key, Relative]:
    """The time of every timed cell but the reference's own, relative to the reference of the run."""
    found = {}
    for record, pairs, controls in paired(results):
        ratio = paired_ratio(pairs)
        if ratio is not None:
            num_epochs = len({epoch for epoch, _ in pairs.visits})
            found[key_of(record)] = Relative(ratio=ratio, floor=paired_ratio(controls), num_epochs=num_epochs)
    return found


def between_runs(  # noqa: PLR0913 - two runs, and what of them may be compared
    base: Results,
    candidate: Results,
    matches: Sequence[Match],
    thresholds: Thresholds,
    *,
    obstacle: str = "",
    is_elsewhere: bool = False,
) -> tuple[list[Ruling], Ruling]:
    """The rulings on the times of two separate runs, and the one on all of them together.

    `obstacle` says why no times may be compared, if so; `is_elsewhere` that the runs are of different machines or
    versions, whose ratios differ by more.
    """
    before, after = relatives(base), relatives(candidate)
    least_floor = thresholds.elsewhere if is_elsewhere else 0.0
    compared: list[Compared] = []
    others: list[Ruling] = []
    by_workload: dict[str, list[Estimate]] = {}
    for match in matches:
        old, new = match.base, match.candidate
        if old is None or new is None or not (old.status is new.status is Status.ok) or not old.measurement(LATENCY):
            continue
        earlier, later = before.get(key_of(old)), after.get(match.key)
        values = (None, None, "s") if is_elsewhere else _medians(match)
        if obstacle or earlier is None or later is None:
            others.append(_not_compared(new, values, candidate.plan.baseline, obstacle))
            continue
        effect = effect_between_runs(earlier, later, thresholds.between_runs, least_floor)
        allowed = max(thresholds.allowed(*match.key, LATENCY), least_floor)
        is_asked = thresholds.asked(*match.key, LATENCY) is not None and not is_elsewhere
        effect = replace(effect, allowed=allowed, lowest=effect.margin if is_asked else 0.0)
        shown = (earlier.ratio.point, later.ratio.point, "x") if is_elsewhere else values
        compared.append((match, effect, shown))
        if effect.ratio.standard_error is not None and effect.num_processes >= thresholds.fewest_epochs:
            by_workload.setdefault(match.key[0], []).append(effect_between_runs(earlier, later, 0.0).ratio)
    policy = Policy(
        is_paired=False,
        fewest_processes=thresholds.fewest_epochs,
        detectable=max(thresholds.see, 2 * least_floor),
    )
    rulings = [*_judged(compared, policy, thresholds), *others]
    if not by_workload:
        return rulings, ruling(EVERYTHING, LATENCY, Kind.undecided, "no time could be judged")
    asked_of_all = thresholds.asked_of_all([match.key for match, _, _ in compared], LATENCY)
    allowed = max(ALLOWED[LATENCY] if asked_of_all is None else asked_of_all, least_floor)
    mean = replace(mean_between_runs(by_workload.values(), thresholds.between_runs, least_floor), allowed=allowed)
    lead = f"geometric mean over {sum(map(len, by_workload.values()))} times: "
    (judged,) = judge([mean], replace(policy, fewest_processes=0, detectable=thresholds.see))
    return rulings, _ruling(EVERYTHING, judged, lead=lead)


def _not_compared(record: Record, values: Values, reference: str, obstacle: str) -> Ruling:
    """The ruling on a time of which there is no ratio in both runs."""
    kind = Kind.undecided
    if record.measurement(LATENCY) is None:
        kind, words = Kind.lost, "its time is no longer measured"
    elif obstacle:
        words = f"times cannot be compared: {obstacle}"
    elif record.implementation == reference:
        kind, words = Kind.same, "the reference: other times are judged relative to it, and its own is only printed"
    else:
        words = f"there is no reference for it: {reference} was not measured on this workload in both runs"
    base, candidate, unit = values
    return ruling(key_of(record), LATENCY, kind, words, base=base, candidate=candidate, unit=unit)


def side_by_side(  # noqa: PLR0913 - the effects, and what bounds them
    cells: Sequence[tuple[Record, Effect]],
    matches: Iterable[Match],
    thresholds: Thresholds,
    policy: Policy,
    floors: Mapping[str, Estimate],
    *,
    is_apart: bool = False,
) -> list[Ruling]:
    """The rulings on the times of a session with two sides.

    `cells` are the candidate's records with their effects, `policy` is the session's, `floors` are by workload id
    (comparisons.noise_floors), and `is_apart` says that each side had processes of its own.

    The lowest threshold that can be judged is how far from 1 the ratio of identical code may seem. The base's A/A
    control shows it. Where sides are apart, the control lies in the base's own process, and shows nothing of what
    processes differ by; the interval of the cell itself, which counts processes, does.
    """
    of_key = {match.key: match for match in matches}
    compared: list[Compared] = []
    for record, effect in cells:
        match, asked = of_key[key_of(record)], thresholds.asked(*key_of(record), LATENCY)
        floor, high = floors.get(record.workload.id), effect.ratio.high
        lowest = 0.0
        if floor is not None and floor.high is not None and floor.low is not None:
            lowest = max(floor.high, 1 / floor.low) - 1
        if is_apart and high is not None:
            lowest = max(lowest, high / effect.ratio.point - 1)
        compared.append((match, replace(effect, allowed=asked, lowest=lowest), _medians(match)))
    return _judged(compared, replace(policy, detectable=thresholds.see), thresholds)


def _judged(compared: Sequence[Compared], policy: Policy, thresholds: Thresholds) -> list[Ruling]:
    judged = judge([effect for _, effect, _ in compared], policy)
    return [
        suspected(_ruling(match.key, each, values), match, thresholds)
        for (match, _, values), each in zip(compared, judged, strict=True)
    ]


def whole(effect: Effect | None, thresholds: Thresholds, cells: Collection[Key]) -> Ruling:
    """The ruling on a whole session with two sides; what rules allow to each of its cells is allowed to it."""
    if effect is None:
        return ruling(EVERYTHING, LATENCY, Kind.undecided, "nothing can be said of the whole")
    (judged,) = judge([replace(effect, allowed=thresholds.asked_of_all(cells, LATENCY))], WHOLE)
    return _ruling(EVERYTHING, judged, lead="geometric mean: ")


def suspected(made: Ruling, match: Match, thresholds: Thresholds) -> Ruling:
    """The same, or a finding where it is too good to be taken over: code that computes less is faster, too."""
    if made.kind is not Kind.faster or made.effect is None or made.effect >= 1 - thresholds.suspicious:
        return made
    assert match.candidate is not None
    agreement = match.candidate.agreement
    if agreement is not None and agreement.agrees:
        probes, before = (
            {probe.probe for probe in agreement.probes},
            tried(match.base.agreement if match.base else None),
        )
        if set(WHOLE_CHECK) <= probes or (before and before <= tried(agreement) and len(probes) > 1):  # as the base was
            words = f"{made.words}; more than {100 * thresholds.suspicious:g} %, and its check in this run was whole"
            return msgspec.structs.replace(made, words=words)
    words = f"{made.words}: too good to be accepted without a check of its own; run it with its check"
    return msgspec.structs.replace(made, kind=Kind.suspicious, outcome=Outcome.finding, words=words)


def _medians(match: Match) -> Values:
    """Seconds of a call on both sides."""
    measured = (None if each is None else each.measurement(LATENCY) for each in (match.base, match.candidate))
    base, candidate = (
        None if found is None or not found.samples else median_estimate(found.samples).point for found in measured
    )
    return base, candidate, "s"


def _ruling(key: Key, judged: Judgement, values: Values = (None, None, ""), lead: str = "") -> Ruling:
    ratio = judged.effect.ratio
    base, candidate, unit = values
    return ruling(
        key,
        LATENCY,
        KINDS[judged.verdict],
        lead + words(judged),
        reason=judged.reason,
        base=base,
        candidate=candidate,
        unit=unit,
        effect=ratio.point,
        low=ratio.low,
        high=ratio.high,
        smallest=judged.detectable,
    )


def words(judged: Judgement) -> str:
    """A judgement in words, with the reason, and what to do where there is no verdict."""
    effect, change, allowed = judged.effect, _change(judged.effect.ratio), judged.effect.allowed
    if judged.verdict is Verdict.undecided:
        return _undecided(judged)
    if judged.verdict is Verdict.faster:
        return f"faster: {change}"
    if judged.verdict is Verdict.slower:
        return f"slower: {change}" + ("" if allowed is None else f"; allowed is {percent(max(allowed, effect.margin))}")
    if effect.is_within and effect.e_apart >= judged.needed.agree and allowed != math.inf:
        return f"equivalent: {change}"
    if allowed is not None and (allowed == math.inf or not judged.would_show):
        return f"{change}; {'any growth is allowed' if allowed == math.inf else f'allowed is {percent(allowed)}'}"
    return f"{'not clearly slower' if effect.seems_slower else 'no slower'}: {change}"


def _undecided(judged: Judgement) -> str:
    effect, policy = judged.effect, judged.policy
    if judged.reason is Reason.few_processes:
        measured = f"measured in {processes(effect.num_processes)}"
        more = "raise num_epochs in the sweep file, and --rounds to as many or more"
        return f"{measured}; a gate judges from {policy.fewest_processes} in each run on: {more}"
    asked = effect.allowed or 0.0
    if judged.reason is Reason.noise_floor:
        where = "in this session" if policy.is_paired else "between two separate runs"
        why = f"identical code may seem {percent(effect.lowest)} apart {where}; raise it, or measure longer"
        return f"a threshold of {percent(asked)} cannot be judged: {why}"
    if judged.reason is Reason.smallest_effect:
        why = f"differences below {percent(effect.smallest)} count as none in this session"
        return f"a threshold of {percent(asked)} cannot be judged: {why}; " + (
            f"compare with --smallest-effect {asked:g}" if asked else "raise it"
        )
    show = "too few measurements to show any difference"
    if judged.detectable is not None:
        show = f"differences above {reach(judged.detectable)} would show"
    return f"undecided: {_change(effect.ratio)}; {show}" + ("" if policy.is_paired else "; run with more --rounds")


def reach(smallest: float) -> str:
    """The smallest slowdown that would have been found, in words."""
    return percent(smallest) if smallest < FARTHEST else f"{FARTHEST + 1:g} times the time"


def _change(ratio: Estimate) -> str:
    """A ratio as a change with its interval: "+5.2 % (+3.0 to +7.5)"."""
    point, low, high = (
        None if end is None else f"{100 * (end - 1):+.1f}" for end in (ratio.point, ratio.low, ratio.high)
    )
    return f"{point} %" + ("" if low is None else f" ({low} to {high})")


def processes(number: int) -> str:
    """How many processes, in words."""
    return "1 process" if number == 1 else f"{number} processes"
