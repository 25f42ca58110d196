"""Statistical gates: whether a cell takes longer than before, where identical code never takes the same time twice.

Two separate runs share no blocks, so that no pair can be made between them, and a machine's mood differs by tens of
percent from run to run. What is compared is the ratio to the reference, the baseline implementation that both runs had
in every block: the candidate's ratio over the base's. Its error has three parts: that of each run's ratio, clustered by
visit and epoch, and what such a ratio differs by from run to run for no reason (`between_runs`). Why: docs/adr/0019.

Sources: B. L. Welch, 1947, https://doi.org/10.1093/biomet/34.1-2.28 (two means, unequal errors); Benjamini and
Yekutieli, 2001, https://doi.org/10.1214/aos/1013699998 (false discoveries under any dependence).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnbench.analysis.comparisons import paired
from attnbench.analysis.gate.cells import Key
from attnbench.analysis.gate.rulings import EVERY, LATENCY, Kind, Outcome, Ruling
from attnbench.analysis.gate.thresholds import Thresholds
from attnbench.analysis.results import Results
from attnbench.statistics.intervals import CONFIDENCE, Estimate, mean_of, paired_ratio, t_quantile
from attnbench.statistics.verdicts import FALSE_SHARE, POWER
from attnbench.units import percent

STEADY = 1e6
"""Degrees of freedom of what is known from elsewhere: as many as none."""
FARTHEST = 9.0
"""From here on the number of percents says no more."""


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A cell's time in one run, relative to that run's reference."""

    ratio: Estimate
    floor: Estimate | None  # the reference's twin relative to it, in the same blocks: identical code
    num_epochs: int


@dataclass(frozen=True, kw_only=True)
class Effect:
    """How many times longer a cell takes than it did, and how far apart identical code would seem here."""

    workload: str
    implementation: str
    ratio: Estimate
    floor: float | None  # relative; None: not known
    num_epochs: int  # of the run with fewer


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the judging of one time needs beside its effect."""

    allowed: float
    is_by_rule: bool  # a rule of the file says so
    see: float
    fewest_epochs: int
    how: str = "between two separate runs"  # how the two were compared, for the reasons


def relatives(results: Results) -> dict[Key, Relative]:
    """Every timed cell but the reference's own."""
    found = {}
    for record, pairs, twins in paired(results):
        ratio = paired_ratio(pairs)
        if ratio is not None:
            num_epochs = len({epoch for epoch, _ in pairs.visits})
            key = record.workload.id, record.implementation
            found[key] = Relative(ratio=ratio, floor=paired_ratio(twins), num_epochs=num_epochs)
    return found


def effect(key: Key, base: Relative, candidate: Relative, between_runs: float, apart: float = 0.0) -> Effect:
    """The candidate's relative time over the base's; identical code may lie `apart` by what two machines differ by."""
    parts = (*_variance(base.ratio), *_variance(candidate.ratio), (2 * between_runs**2, STEADY))
    has_error = None not in {base.ratio.standard_error, candidate.ratio.standard_error}
    floor = _floor(base.floor, candidate.floor, between_runs)
    return Effect(
        workload=key[0],
        implementation=key[1],
        ratio=Estimate(
            point=candidate.ratio.point / base.ratio.point,
            standard_error=_root(parts) if has_error else None,
            num_clusters=base.ratio.num_clusters + candidate.ratio.num_clusters,
            num_samples=base.ratio.num_samples + candidate.ratio.num_samples,
            degrees=_degrees(parts),
        ),
        floor=max(floor or 0.0, apart) if apart else floor,
        num_epochs=min(base.num_epochs, candidate.num_epochs),
    )


def _variance(ratio: Estimate) -> list[tuple[float, float]]:
    return [] if ratio.standard_error is None else [(ratio.standard_error**2, ratio.degrees or ratio.num_clusters - 1)]


def _root(parts: Sequence[tuple[float, float]]) -> float:
    return math.sqrt(sum(variance for variance, _ in parts))


def _degrees(parts: Sequence[tuple[float, float]]) -> float:
    """Of freedom of a sum of variances, by Satterthwaite."""
    free = sum(variance**2 / degrees for variance, degrees in parts)
    return sum(variance for variance, _ in parts) ** 2 / free if free else STEADY


def _floor(base: Estimate | None, candidate: Estimate | None, between_runs: float) -> float | None:
    """How far from 1 a ratio of ratios of identical code may lie: both runs' A/A, and what runs differ by."""
    logs = [floor.largest_log for floor in (base, candidate) if floor is not None]
    if len(logs) < 2 or None in logs:  # noqa: PLR2004 - both runs
        return None
    reach = t_quantile((1 + CONFIDENCE) / 2, STEADY) * math.sqrt(2) * between_runs
    return math.expm1(math.hypot(reach, *(log or 0.0 for log in logs)))


def p_value(ratio: Estimate) -> float:
    """How often identical code would seem as far apart or further; 1 where there is no error to tell it by."""
    if ratio.standard_error is None:
        return 1.0
    log = abs(math.log(ratio.point))
    if ratio.standard_error == 0.0:
        return float(log == 0.0)
    from scipy.special import stdtr  # here, because it takes longer to import than --help may take

    return 2 * float(stdtr(ratio.degrees or ratio.num_clusters - 1, -log / ratio.standard_error))


def sure(effects: Sequence[Effect]) -> list[bool]:
    """Which effects are no chance: of those called so, 5 % are false at most, however cells depend on one another."""
    if not effects:
        return []
    from scipy.stats import false_discovery_control

    adjusted = false_discovery_control([p_value(each.ratio) for each in effects], method="by")
    return [bool(value <= FALSE_SHARE) for value in adjusted]


def smallest(effects: Sequence[Effect], known: Sequence[bool], limits: Sequence[float]) -> list[float | None]:
    """For each, the slowdown that would have been found in 80 % of repetitions, beside those that are found already.

    None where there is no error to tell it by, and where none would be: whatever it is, it is allowed.
    """
    number, rank = len(effects), min(sum(known) + 1, max(1, len(effects)))
    harmonic = sum(1 / place for place in range(1, number + 1))
    level = FALSE_SHARE * rank / (number * harmonic) if number else FALSE_SHARE
    found: list[float | None] = []
    for each, limit in zip(effects, limits, strict=True):
        error = each.ratio.standard_error
        if error is None or math.isinf(limit):
            found.append(None)
            continue
        needed = max(each.ratio.quantile(1 - level / 2) * error, math.log1p(limit))
        found.append(math.expm1(min(needed + each.ratio.quantile(POWER) * error, 700.0)))
    return found


def rule(each: Effect, asked: Asked, *, is_sure: bool, smallest: float | None) -> tuple[Kind, Outcome, str]:
    """What one effect comes to, and why; what a rule allows has no say in what is faster."""
    log, change, floor = math.log(each.ratio.point), _percent(each.ratio), each.floor or 0.0
    limit = max(asked.allowed, floor)
    is_plain = is_sure and each.num_epochs >= asked.fewest_epochs
    if is_plain and log < -math.log1p(floor):
        return Kind.faster, Outcome.improved, f"faster: {change} in time"
    if math.isinf(asked.allowed):
        return Kind.same, Outcome.passed, f"{change}; any growth is allowed"
    if is_plain and log > math.log1p(limit):
        return Kind.slower, Outcome.finding, f"slower: {change}; allowed is {percent(limit)}"
    doubt = _doubt(each, asked, smallest)
    if doubt is not None:
        return doubt[0], Outcome.inconclusive, doubt[1]
    could_show = smallest is not None and smallest <= asked.see
    words = f"no slower: {change}" if could_show else f"{change}; allowed is {percent(asked.allowed)}"
    return Kind.same, Outcome.passed, words


def _doubt(each: Effect, asked: Asked, smallest: float | None) -> tuple[Kind, str] | None:
    """Why a time that is plainly neither faster nor slower cannot be judged; None where it can."""
    if each.num_epochs < asked.fewest_epochs:
        words = f"measured in {processes(each.num_epochs)}; a gate judges from {asked.fewest_epochs} in each run on"
        return Kind.undecided, f"{words}: raise num_epochs in the sweep file, and --rounds to as many or more"
    if asked.is_by_rule and each.floor is not None and asked.allowed < each.floor:
        floor = f"identical code may seem {percent(each.floor)} apart {asked.how}"
        words = f"a threshold of {percent(asked.allowed)} cannot be judged: {floor}; raise it, or measure longer"
        return Kind.refused, words
    is_allowed = each.ratio.high is not None and each.ratio.high <= 1 + asked.allowed
    if is_allowed or (smallest is not None and smallest <= asked.see):
        return None
    could = "nothing is known of its error" if smallest is None else f"less than {reach(smallest)} would not show"
    return Kind.undecided, f"undecided: {_percent(each.ratio)}, and {could}; run with more --rounds"


def rulings(
    effects: Sequence[Effect], asked: Mapping[Key, Asked], shown: Mapping[Key, tuple[float, float, str]]
) -> list[Ruling]:
    """Every time judged, together; `shown` holds what to print of a cell: base, candidate and their unit."""
    known = sure(effects)
    wanted = [asked[each.workload, each.implementation] for each in effects]
    limits = [max(each.floor or 0.0, ask.allowed) for each, ask in zip(effects, wanted, strict=True)]
    made = []
    for each, ask, is_sure, least in zip(effects, wanted, known, smallest(effects, known, limits), strict=True):
        kind, outcome, words = rule(each, ask, is_sure=is_sure, smallest=least)
        made.append(ruling(each, kind, outcome, words, least, shown.get((each.workload, each.implementation))))
    return made


def ruling(  # noqa: PLR0913, PLR0917 - the fields of a ruling, in their order
    each: Effect,
    kind: Kind,
    outcome: Outcome,
    words: str,
    least: float | None,
    shown: tuple[float, float, str] | None = None,
) -> Ruling:
    """A ruling on time."""
    base, candidate, unit = shown or (None, None, "")
    return Ruling(
        workload=each.workload,
        implementation=each.implementation,
        metric=LATENCY,
        kind=kind,
        outcome=outcome,
        words=words,
        base=base,
        candidate=candidate,
        unit=unit,
        effect=each.ratio.point,
        low=each.ratio.low,
        high=each.ratio.high,
        smallest=least,
    )


def suite(
    effects: Sequence[Effect], thresholds: Thresholds, between_runs: float, limit: float, apart: float = 0.0
) -> Ruling:
    """All times together: the geometric mean, its error clustered by workload, whose cells share a reference."""
    groups: dict[str, list[Estimate]] = {}
    for each in effects:
        if each.ratio.standard_error is not None and each.num_epochs >= thresholds.fewest_epochs:
            groups.setdefault(each.workload, []).append(each.ratio)
    if not groups:
        return _suite(Kind.undecided, Outcome.inconclusive, "no time could be judged", None)
    mean = mean_of([_workload(ratios) for ratios in groups.values()])
    parts = [((mean.standard_error or 0.0) ** 2, mean.degrees or STEADY), (2 * between_runs**2, STEADY)]
    ratio = Estimate(
        point=mean.point,
        standard_error=_root(parts),
        num_clusters=len(groups),
        num_samples=mean.num_samples,
        degrees=_degrees(parts),
    )
    whole = Effect(workload=EVERY, implementation=EVERY, ratio=ratio, floor=apart, num_epochs=thresholds.fewest_epochs)
    known = sure([whole])
    least = smallest([whole], known, [limit])[0]
    asked = Asked(allowed=limit, is_by_rule=False, see=thresholds.see, fewest_epochs=1)
    kind, outcome, words = rule(whole, asked, is_sure=known[0], smallest=least)
    return _suite(kind, outcome, f"geometric mean over {sum(map(len, groups.values()))} times: {words}", whole, least)


def _workload(ratios: Sequence[Estimate]) -> Estimate:
    """The mean of one workload, its errors taken as one and the same."""
    return Estimate(
        point=math.exp(sum(math.log(ratio.point) for ratio in ratios) / len(ratios)),
        standard_error=sum(ratio.standard_error or 0.0 for ratio in ratios) / len(ratios),
        num_clusters=min(ratio.num_clusters for ratio in ratios),
        num_samples=sum(ratio.num_samples for ratio in ratios),
        degrees=min(ratio.degrees or ratio.num_clusters - 1.0 for ratio in ratios),
    )


def _suite(kind: Kind, outcome: Outcome, words: str, whole: Effect | None, least: float | None = None) -> Ruling:
    if whole is not None:
        return ruling(whole, kind, outcome, words, least)
    return Ruling(workload=EVERY, implementation=EVERY, metric=LATENCY, kind=kind, outcome=outcome, words=words)


def reach(smallest: float) -> str:
    """The smallest slowdown that would have been found, in words."""
    return percent(smallest) if smallest < FARTHEST else f"{FARTHEST + 1:g} times the time"


def _percent(ratio: Estimate) -> str:
    """A ratio as a change with its interval: "+5.2 % (+3.0 to +7.5)"."""
    if ratio.low is None or ratio.high is None:
        return f"{100 * (ratio.point - 1):+.1f} %"
    low, high = (100 * (end - 1) for end in (ratio.low, ratio.high))
    return f"{100 * (ratio.point - 1):+.1f} % ({low:+.1f} to {high:+.1f})"


def processes(number: int) -> str:
    """How many processes, in words."""
    return "1 process" if number == 1 else f"{number} processes"
