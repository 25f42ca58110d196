"""One comparison on several hosts: the verdict on each kind of host, and how far its hosts lie apart.

A block never spans hosts, so that each host has an effect of its own. Those of one kind are put together: e-values by
their mean, which is an e-value whatever the hosts have in common, and ratios by a random effect of the host, so that
the interval holds for another host of that kind, too. Kinds, which are other models of processor or accelerator, are
never put together: they may have other winners. A host whose baseline differs from its own A/A control is left out,
and so is one that was there for too short a time for that test, where enough others are left.

What is left out counts as an e-value of 0, so that leaving out can never make evidence: the mean is that of all hosts.

Sources: the mean of e-values, Vovk and Wang, E-values: calibration, combination and applications, 2021,
https://doi.org/10.1214/20-AOS2020; the variance between groups, DerSimonian and Laird, 1986,
https://doi.org/10.1016/0197-2456(86)90046-2; the interval, Hartung and Knapp, 2001, https://doi.org/10.1002/sim.791,
and Sidik and Jonkman, 2002, https://doi.org/10.1002/sim.1262. Why: docs/adr/0039.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnbench.statistics import evidence
from attnbench.statistics.intervals import FEWEST_CLUSTERS, Estimate, Pairs, mean_of
from attnbench.statistics.verdicts import Effect, margin
from attnbench.storage.records import FALSE_SHARE
from attnbench.units import percent
from attnbench.workloads.sweep import SMALLEST_EFFECT

FEWEST_HOSTS = 3
"""With fewer nothing is known of how far hosts lie apart: an interval holds for these hosts alone."""
FEWEST_TESTS = 6
"""A/A differences, one of each process and workload. Where memory lies so unluckily that they are 7 % (a standard
deviation), the median is beyond 2 % in 95 of 100 hosts with six or seven, in 87 with three, and in 78 with one."""
UNTESTED = f"too short for an A/A test of its own: fewer than {FEWEST_TESTS} processes and workloads"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one host saw of one comparison, in blocks that are all its own."""

    host: str
    kind: str
    """The model of its processor or accelerator, with all else that must be the same for times to be put together."""
    effect: Effect
    control: Estimate | None = None
    """The baseline's A/A control relative to it."""

    @property
    def is_short(self) -> bool:
        """Whether it has too few visits to say how much they scatter."""
        return self.effect.ratio.standard_error is None


@dataclass(frozen=True, kw_only=True)
class OfKind:
    """What the hosts of one kind say of one comparison, together."""

    kind: str
    effect: Effect
    ratios: dict[str, Estimate]
    """Of each host that counts, by its name."""
    spread: float | None
    """By how much hosts differ: a standard deviation of the log ratio; None below `FEWEST_HOSTS`."""
    left_out: dict[str, str]
    """Why a host does not count, by its name."""

    @property
    def is_general(self) -> bool:
        """Whether the interval is one for hosts of this kind, and not for those that were measured alone."""
        return self.spread is not None


def failing(controls: Mapping[str, Sequence[Pairs]], smallest: float = SMALLEST_EFFECT) -> dict[str, str]:
    """The hosts whose own A/A test fails, with the reason: identical code differs there by what would matter.

    `controls` are each host's pairs of the baseline's control with the baseline, one for each workload. Each process
    counts by itself, since biases of several would cancel. It takes evidence, which noise does not make, and a median
    difference beyond `smallest`: one process with an unlucky layout fails no host, but makes hosts lie further apart.
    """
    seen: dict[str, list[tuple[float, float]]] = {}  # of each process and workload, the e-value and the log ratio
    for host, own in controls.items():
        parts = [part for pairs in own for part in _by_process(pairs)]
        if parts:
            seen[host] = [(evidence.last(evidence.e_values(logs)), abs(float(np.median(logs)))) for logs in parts]
    means = np.array([np.mean([e_value for e_value, _ in found]) for found in seen.values()])
    sizes = [float(np.median([size for _, size in found])) for found in seen.values()]
    differ = evidence.discoveries(np.where(np.array(sizes) > math.log1p(smallest), means, 0.0), FALSE_SHARE)
    return {
        host: f"its A/A test fails: identical code differs by {percent(math.expm1(size))} (median of {len(found)})"
        for (host, found), size, differs in zip(seen.items(), sizes, differ, strict=True)
        if differs
    }


def untested(controls: Mapping[str, Sequence[Pairs]]) -> set[str]:
    """The hosts with fewer than `FEWEST_TESTS` differences of identical code, whatever these are: see `failing`."""
    numbers = {host: sum(len({epoch for epoch, _ in each.visits}) for each in own) for host, own in controls.items()}
    return {host for host, number in numbers.items() if number < FEWEST_TESTS}


def _by_process(pairs: Pairs) -> list[evidence.Array]:
    """The log ratios of each process."""
    epochs = np.array([epoch for epoch, _ in pairs.visits])
    return [pairs.logs[epochs == epoch] for epoch in np.unique(epochs)]


def by_kind(
    seen: Sequence[Seen],
    failed: Mapping[str, str],
    smallest: float = SMALLEST_EFFECT,
    short: Collection[str] = (),
) -> dict[str, OfKind]:
    """What each kind of host says of one comparison; without the kinds of which no host counts.

    `failed` are the hosts of `failing`, and `short` those of `untested`. The effects are to be judged together with
    those of all other comparisons.

    Raises:
        ValueError: a host is there twice, or is of two kinds.
    """
    names = [each.host for each in seen]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)} has seen one comparison twice: put the blocks of a host together first")
    kinds = dict.fromkeys(each.kind for each in seen)
    of_kinds = {kind: [each for each in seen if each.kind == kind] for kind in kinds}
    found = {kind: _together(kind, own, dict(failed), smallest, short) for kind, own in of_kinds.items()}
    return {kind: of_kind for kind, of_kind in found.items() if of_kind is not None}


def _together(
    kind: str, seen: Sequence[Seen], failed: dict[str, str], smallest: float, short: Collection[str]
) -> OfKind | None:
    whole = [each for each in seen if each.host not in failed]
    tested = [each for each in whole if each.host not in short and not each.is_short]
    if len(tested) >= max(FEWEST_HOSTS, len(whole) / 2):  # else too little would be left of what was measured
        failed |= {each.host: UNTESTED for each in whole if each.host in short}
        whole = [each for each in whole if each.host not in failed]
    kept = [each for each in whole if not each.is_short] or whole  # of short ones only: a ratio without an interval
    if not kept:
        return None
    names = {each.host for each in kept}
    few = f"fewer than {FEWEST_CLUSTERS} visits"
    ratio, spread = pooled([each.effect.ratio for each in kept])
    floors = [each.control for each in kept if each.control is not None and each.control.standard_error is not None]
    floor = pooled(floors)[0] if floors else None
    return OfKind(
        kind=kind,
        effect=Effect(
            ratio=ratio,
            margin=margin(floor, smallest),
            smallest=smallest,
            e_same=sum(each.effect.e_same for each in kept) / len(seen),
            e_apart=sum(each.effect.e_apart for each in kept) / len(seen),
            spread=float(np.median([each.effect.spread for each in kept])),
        ),
        ratios={each.host: each.effect.ratio for each in kept},
        spread=spread,
        left_out={each.host: failed.get(each.host, few) for each in seen if each.host not in names},
    )


def pooled(ratios: Sequence[Estimate]) -> tuple[Estimate, float | None]:
    """The mean ratio of hosts of one kind, and how far hosts lie apart: a standard deviation of the log.

    With fewer than `FEWEST_HOSTS` there is no such spread, and the interval is that of the mean of these hosts. The
    number of samples is that of a usual host: a mean of e-values grows as those of one host do.

    A host's variance is taken halfway between its own and that of all: weights by its own alone, known from a handful
    of visits, make intervals that cover the truth 88 to 94 times of 100, and without it one noisy host widens them.
    """
    usual = int(np.median([each.num_samples for each in ratios]))
    errors = np.array([each.standard_error for each in ratios], dtype=np.float64)  # NaN: too few visits
    if np.isnan(errors).any() or len(ratios) < FEWEST_HOSTS:
        own = replace(mean_of(ratios), num_samples=usual)
        return replace(own, standard_error=None) if np.isnan(errors).any() else own, None
    logs = np.array([math.log(each.point) for each in ratios])
    sizes = np.array([each.num_clusters for each in ratios], dtype=np.float64)
    freedoms = np.array([each.freedom for each in ratios])
    noise = float(np.sum(freedoms * sizes * errors**2) / np.sum(freedoms))  # the variance of one visit
    variances = (errors**2 + noise / sizes) / 2
    between = _between(logs, variances) if noise else float(np.var(logs, ddof=1))
    weights = 1 / (variances + between) if noise or between else np.ones_like(logs)
    weights /= weights.sum()
    mean = float(np.sum(weights * logs))
    variance = float(np.sum(weights * (logs - mean) ** 2)) / (len(logs) - 1)
    return (
        Estimate(
            point=math.exp(mean),
            standard_error=math.sqrt(variance),
            num_clusters=len(logs),
            num_samples=usual,
            degrees=len(logs) - 1.0,
        ),
        math.sqrt(between),
    )


def _between(logs: evidence.Array, variances: evidence.Array) -> float:
    """The variance between hosts, after DerSimonian and Laird: of the logs (n,) beyond their own variances (n,)."""
    weights = 1 / variances
    mean = np.sum(weights * logs) / np.sum(weights)
    beyond = float(np.sum(weights * (logs - mean) ** 2)) - (len(logs) - 1)
    return max(0.0, beyond / float(np.sum(weights) - np.sum(weights**2) / np.sum(weights)))
