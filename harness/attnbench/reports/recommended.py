"""The answers of `fastest`, with or without --along: as sentences, as rows, and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from attnbench.analysis.comparisons import doubts, num_processes
from attnbench.analysis.conclusion import factor
from attnbench.analysis.recommendation import (
    OVER,
    Change,
    Lead,
    Recommendation,
    changes_along,
    points,
    recommend,
)
from attnbench.analysis.results import Results
from attnbench.reports import grouped
from attnbench.storage.events import Ladder
from attnbench.storage.records import Verdict
from attnbench.units import MISSING, percent, plain, show, significant, span


def lines(results: Results) -> list[str]:
    """A sentence for each recommendation, or for each searched pair of implementations."""
    if any(ladder.pairs for ladder in results.plan.ladders):
        return [of_crossing(results, ladder, both, changes) for ladder, both, changes in crossings(results)]
    return [answer(each) for each in recommend(results)]


def answer(found: Recommendation) -> str:
    """The recommendation in a sentence or two."""
    if not found.choice:
        return f"There is nothing to recommend: {_nothing_left(found)}."
    alike = [name for name in found.equals if found.verdict(name) is Verdict.equivalent]
    open_ones = [name for name in found.equals if name not in alike]
    if found.standing is not None and found.choice != found.standing.leader:
        alike = [found.standing.leader, *(name for name in alike if name != found.standing.leader)]
    slower = [name for name in found.seconds if name not in {found.choice, *found.equals, *alike}]
    own = f"PyTorch's own choice, {found.reference}"
    me = own if found.choice == found.reference else found.choice
    if not found.equals and not alike:
        alone = "the only one that is left" if found.excluded else "the only one that was asked about"
        text = f"Take {me}: it is {'the fastest' if slower else alone}"
    elif open_ones:
        others = _listed(open_ones)
        text = f"Not clear: {me} seems to be the fastest, and {others} may be as fast"
        text += f"; equal within {_margin(found)}: {_listed(alike)}" if alike else ""
    else:
        text = f"Take {me}: it is as fast as {_listed(alike)}, within {_margin(found)}"
    parts = [_lead(found, slower[0], f"the next, {slower[0]}")] if slower else []
    if found.reference in slower[1:]:
        parts.append(_lead(found, found.reference, own))
    also = ", and " if alike and not open_ones else ", "
    return also.join(filter(None, [text, " and ".join(filter(None, parts))])) + "."


def _nothing_left(found: Recommendation) -> str:
    """Explain an empty recommendation: the least memory that would do, or the reasons."""
    over = {name: found.peaks[name] for name, why in found.excluded.items() if why.kind == OVER}
    if over:
        least = min(over, key=lambda name: over[name])
        return f"the least memory that any needs is {show(over[least], 'bytes')}, by {least}"
    if not found.excluded:
        return "no implementation was timed"
    return f"all are excluded ({', '.join(dict.fromkeys(each.kind for each in found.excluded.values()))})"


def _lead(found: Recommendation, name: str, words: str) -> str:
    lead = found.lead(name)
    return "" if lead is None else f"{_factor(lead)} faster than {words}"


def _factor(lead: Lead) -> str:
    number, _, interval = span(lead.ratio, lead.low, lead.high).partition(" ")
    return f"{number}x{' ' if interval else ''}{interval}"


def _margin(found: Recommendation) -> str:
    stands = found.standing
    assert stands is not None
    return percent(max((each.margin for each in stands.others.values()), default=0.0))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


def changed(change: Change) -> str:
    """One crossover in a sentence."""
    place = change.place
    where = f"{change.axis} {significant(place.at, 3)} on (between {place.low} and {place.high})"
    return f"From {where} {change.after} is faster than {change.before}."


def figures(found: Recommendation) -> list[tuple[str, ...]]:
    """A row for each candidate: name, time of a call, factor to the choice, peak memory.

    Times are the choice's median times the ratio: medians of visits at different moments are not comparable.
    """
    rows: list[tuple[str, ...]] = []
    for name, own in found.seconds.items():
        lead = found.lead(name)
        seconds = own if lead is None or not found.choice else found.seconds[found.choice] * lead.ratio
        to_choice = MISSING if lead is None else factor(lead.ratio, lead.low, lead.high)
        to_choice = "choice" if name == found.choice else to_choice
        mark = " (PyTorch's own)" if name == found.reference else ""
        rows.append((f"{name}{mark}", show(seconds, "s"), to_choice, show(found.peaks.get(name), "bytes")))
    return rows


def of_excluded(found: Recommendation, *, is_verbose: bool = False) -> list[str]:
    """The excluded implementations, a line for each kind of reason, or for each implementation with `is_verbose`."""
    if is_verbose:
        return [plain(f"excluded: {name}: {reason}") for name, reason in found.excluded.items()]
    lines = []
    for kind, names in grouped(found.excluded, lambda name: found.excluded[name].kind).items():
        reason = found.excluded[names[0]].detail
        head = kind if kind.startswith("not ") else f"excluded, {kind}"
        lines.append(plain(f"{head}: {', '.join(names)}{f' ({reason})' if reason and len(names) == 1 else ''}"))
    return lines


def measured(results: Results) -> dict[str, Any]:
    """Folder and method of a run, for JSON."""
    return {
        "run": results.run,
        "folder": str(results.folder),
        "warnings": doubts(results),
        "margin": results.plan.smallest_effect,
        "num_processes": num_processes(results),
        "allocator": results.plan.allocator,
    }


def facts(results: Results, found: Iterable[Recommendation]) -> dict[str, Any]:
    """All recommendations of a run, for JSON."""
    return {
        **measured(results),
        "recommendations": [each.facts() | {"answer": answer(each)} for each in found],
    }


def crossings(results: Results) -> list[tuple[Ladder, tuple[str, str], tuple[Change, ...]]]:
    """Every searched pair along each ladder, with its crossovers."""
    return [
        (ladder, both, changes_along(results, ladder, both)) for ladder in results.plan.ladders for both in ladder.pairs
    ]


def of_crossing(results: Results, ladder: Ladder, both: tuple[str, str], changes: Sequence[Change]) -> str:
    """The crossovers of two implementations in a sentence, or which one is faster everywhere."""
    if changes:
        return " ".join(changed(each) for each in changes)
    known = points(results, ladder, *both)
    decided = {value: each.sign for value, each in known.items() if each.sign}
    if not known:
        return f"{both[0]} and {both[1]} could not be sampled together at any {ladder.axis}: see what failed below."
    if not decided:
        ends = f"{ladder.axis} from {min(known)} to {max(known)}"
        return f"It is not clear at any {ends} which of {_listed(both)} is faster."
    first, second = both
    winner, loser = (first, second) if next(iter(decided.values())) < 0 else (second, first)
    ends = f"from {ladder.axis} {min(decided)} to {max(decided)}"
    text = f"{winner} is faster than {loser} wherever it is decided, {ends}; they do not change places there."
    beyond = [value for value in (ladder.values[0], ladder.values[-1]) if value not in decided]
    return f"{text} Not decided: {ladder.axis} {', '.join(map(str, beyond))}." if beyond else text


def crossing_facts(results: Results) -> dict[str, Any]:
    """All crossings of a run, for JSON."""
    found = [
        {
            "axis": ladder.axis,
            "workload": ladder.workloads[0],
            "implementations": list(both),
            "answer": of_crossing(results, ladder, both, changes),
            "changes": [each.facts() for each in changes],
            "points": {
                str(value): {"sign": each.sign, "log_ratio": each.log, "processes": each.num_processes}
                for value, each in sorted(points(results, ladder, *both).items())
            },
        }
        for ladder, both, changes in crossings(results)
    ]
    return {**measured(results), "crossings": found}
