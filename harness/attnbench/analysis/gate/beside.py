"""Two states of the code that were measured side by side, in the same blocks of one session, as a decision.

There the pairs inside blocks say more than two separate runs can. The verdicts are those of
statistics/verdicts.py; what is certain is judged as between two runs.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from attnbench.analysis.comparisons import comparisons, noise_floors
from attnbench.analysis.gate import certain
from attnbench.analysis.gate.belief import believed
from attnbench.analysis.gate.cells import Couple, Key, matched, metrics
from attnbench.analysis.gate.judge import ailments, conclude, fingerprints, voided
from attnbench.analysis.gate.rulings import EVERY, LATENCY, Decision, Kind, Outcome, Ruling, Side
from attnbench.analysis.gate.thresholds import Thresholds
from attnbench.analysis.overall import by_side, suite
from attnbench.analysis.results import Results
from attnbench.statistics.intervals import Estimate, median_estimate
from attnbench.storage.records import SMALLEST_EFFECT, Comparison, Record, Verdict
from attnbench.units import percent


def of_sides(results: Results, thresholds: Thresholds) -> Decision:
    """The decision on a run that compared two states of the code (`attnbench compare rev:main rev:HEAD`)."""
    sides = results.plan.sides
    assert sides is not None
    base, candidate = by_side(results)
    reasons = list(ailments(results, thresholds, "the session"))
    if sides.is_apart:  # two environments are what was asked for
        reasons = [reason for reason in reasons if "environments" not in reason]
    told = [
        Side(run=each.given, commit=each.commit, time=results.started.time, fingerprint="+".join(fingerprints(results)))
        for each in (sides.base, sides.candidate)
    ]
    return judge(
        (told[0], told[1]),
        (base, candidate),
        comparisons(results),
        _whole(results, thresholds),
        thresholds,
        floors=noise_floors(results),
        notes=[f"{name} is gone: {reason}" for name, reason in sides.lost.items()],
        invalid=reasons,
        is_cut_short=results.elapsed_s is None,
        is_apart=sides.is_apart,
        smallest_effect=results.plan.smallest_effect,
    )


def judge(  # noqa: PLR0913 - what a session has to say
    sides: tuple[Side, Side],
    records: tuple[Sequence[Record], Sequence[Record]],
    comparisons: Sequence[Comparison],
    suite: Ruling,
    thresholds: Thresholds,
    *,
    floors: Mapping[str, Estimate],
    notes: Collection[str] = (),
    invalid: Sequence[str] = (),
    is_cut_short: bool = False,
    is_apart: bool = False,
    smallest_effect: float = SMALLEST_EFFECT,
) -> Decision:
    """The decision on one session.

    `records` are the base's and the candidate's, each implementation under one name on both sides; `comparisons` are of
    the candidate's implementations against themselves in the base; `floors` by workload id (compare.noise_floors);
    `is_apart` says that each side had processes of its own, `smallest_effect` what the session took for no difference.
    """
    coupled = matched(*records)
    certainties = [ruling for couple in coupled for ruling in certain.rulings(couple, thresholds)]
    by_key: dict[Key, Couple] = {couple.key: couple for couple in coupled}
    timed = []
    for found in comparisons:
        couple = by_key.get((found.workload.id, found.implementation))
        if couple is not None:
            lowest = _lowest(found, floors.get(found.workload.id), is_apart=is_apart)
            asked = thresholds.asked(found.workload.id, found.implementation, LATENCY)
            refusal = _refusal(asked, found.high, lowest, smallest_effect)
            timed.append(believed(_time(found, couple, thresholds, asked, refusal), couple, thresholds))
    if invalid:
        timed, suite = [voided(ruling) for ruling in timed], voided(suite)
    return conclude(
        sides,
        (*certainties, *timed),
        suite,
        thresholds,
        notes=(*notes, *thresholds.idle(by_key, metrics(coupled))),
        invalid=invalid,
        is_cut_short=is_cut_short,
    )


def _whole(results: Results, thresholds: Thresholds) -> Ruling:
    """The ruling on the whole session, to which is allowed what the rules allow to each of its cells."""
    whole = suite(results)
    if whole is None:
        return overall(None, Verdict.undecided, None)
    timed = [(found.workload.id, found.implementation) for found in comparisons(results)]
    allowed = thresholds.asked_of_all(timed, LATENCY)
    ruling = overall(whole.ratio, whole.verdict, whole.minimum_detectable_effect, allowed)
    refusal = _refusal(allowed, whole.ratio.high, 0.0, results.plan.smallest_effect)
    if not refusal or ruling.kind in PLAIN:
        return ruling
    return msgspec.structs.replace(ruling, kind=Kind.refused, outcome=Outcome.inconclusive, words=refusal)


def overall(ratio: Estimate | None, verdict: Verdict, smallest: float | None, allowed: float | None = None) -> Ruling:
    """The ruling on a whole session, from its mean ratio; `allowed` is what rules allow to every cell, if any."""
    nothing = Ruling(
        workload=EVERY,
        implementation=EVERY,
        metric=LATENCY,
        kind=Kind.undecided,
        outcome=Outcome.inconclusive,
        words="nothing can be said of the whole",
    )
    if ratio is None:
        return nothing
    kind, outcome = VERDICTS[verdict]
    words = f"geometric mean: {_told(verdict, ratio.point, ratio.low, ratio.high, smallest)}"
    if allowed is not None and _is_allowed(kind, ratio.point, ratio.high, allowed):
        kind, outcome, words = Kind.same, Outcome.passed, f"{words}; {_permitted(allowed)}"
    return msgspec.structs.replace(
        nothing,
        kind=kind,
        outcome=outcome,
        words=words,
        effect=ratio.point,
        low=ratio.low,
        high=ratio.high,
        smallest=smallest,
    )


VERDICTS = {
    Verdict.slower: (Kind.slower, Outcome.finding),
    Verdict.faster: (Kind.faster, Outcome.improved),
    Verdict.equivalent: (Kind.same, Outcome.passed),
    Verdict.undecided: (Kind.undecided, Outcome.inconclusive),
}
PLAIN = (Kind.slower, Kind.faster)
"""What is so whatever a rule asks for."""


def _lowest(found: Comparison, floor: Estimate | None, *, is_apart: bool) -> float:
    """The lowest threshold that can be judged: how far from 1 the ratio of identical code may seem.

    The base's twin tells it. Apart, the twin lies in the base's own process, and nothing of what one process differs
    by from another is in it; that is in the interval of the cell itself, which counts processes.
    """
    by_twin = 0.0 if floor is None or floor.high is None or floor.low is None else max(floor.high, 1 / floor.low) - 1
    if not is_apart or found.high is None:
        return by_twin
    return max(by_twin, found.high / found.ratio - 1)


def _refusal(asked: float | None, high: float | None, lowest: float, smallest_effect: float) -> str:
    """Why a threshold that a rule asks for cannot be judged, where the ratio may be up to `high`; empty: it can."""
    if asked is None or asked >= max(lowest, smallest_effect):
        return ""
    words = f"a threshold of {percent(asked)} cannot be judged"
    if asked < lowest:
        seen = f"identical code may seem {percent(lowest)} apart in this session"
        return f"{words}: {seen}; raise it, or measure longer"
    if high is not None and high <= 1 + asked:
        return ""
    taken = f"the session takes less than {percent(smallest_effect)} for no difference"
    return f"{words}: {taken}; {f'compare with --smallest-effect {asked:g}' if asked else 'raise it'}"


def _time(found: Comparison, couple: Couple, thresholds: Thresholds, asked: float | None, refusal: str) -> Ruling:
    """A comparison as a ruling; what no rule allows, nothing does: the verdict has a margin of its own."""
    kind, outcome = VERDICTS[found.verdict]
    words = _told(found.verdict, found.ratio, found.low, found.high, found.minimum_detectable_effect)
    smallest = found.minimum_detectable_effect
    if refusal and kind not in PLAIN:
        kind, outcome, words = Kind.refused, Outcome.inconclusive, refusal
    elif asked is not None and _is_allowed(kind, found.ratio, found.high, asked):
        kind, outcome, words = Kind.same, Outcome.passed, f"{words}; {_permitted(asked)}"
    elif kind is Kind.undecided and smallest is not None and smallest <= thresholds.see and not _seems_slower(found):
        kind, outcome = Kind.same, Outcome.passed
        words = f"no slowdown found: {words}"
    both = _medians(couple)
    return Ruling(
        workload=found.workload.id,
        implementation=found.implementation,
        metric=LATENCY,
        kind=kind,
        outcome=outcome,
        words=words,
        base=both[0],
        candidate=both[1],
        unit="s",
        effect=found.ratio,
        low=found.low,
        high=found.high,
        smallest=smallest,
    )


def _is_allowed(kind: Kind, ratio: float, high: float | None, allowed: float) -> bool:
    """Whether a rule allows what was seen: the ratio of what is slower, all of the interval of what is undecided."""
    if kind is Kind.undecided:
        return math.isinf(allowed) or (high is not None and high <= 1 + allowed)
    return kind is Kind.slower and ratio <= 1 + allowed


def _permitted(allowed: float) -> str:
    return "any growth is allowed" if math.isinf(allowed) else f"allowed is {percent(allowed)}"


def _seems_slower(found: Comparison) -> bool:
    """Whether the interval lies above 1: too little for a verdict, too much for a pass."""
    return found.low is not None and found.low > 1


def _medians(couple: Couple) -> tuple[float | None, ...]:
    found = (record.measurement(LATENCY) if record is not None else None for record in (couple.base, couple.candidate))
    return tuple(None if each is None or not each.samples else median_estimate(each.samples).point for each in found)


def _told(verdict: Verdict, ratio: float, low: float | None, high: float | None, smallest: float | None) -> str:
    span = "" if low is None or high is None else f" ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})"
    could = "" if smallest is None else f"; less than {percent(smallest)} would not show"
    return f"{verdict}: {100 * (ratio - 1):+.1f} %{span}{could if verdict is Verdict.undecided else ''}"
