"""What `fastest` and `crossover` say, and what the same gives from Python: the answer first, then its grounds."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import typer

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.recommendation import Change, Limits, Recommendation, changes_along, points, recommend
from attnbench.analysis.results import Results
from attnbench.commands import VERBOSITY, ExitCode, running
from attnbench.commands.terminal import print_table, print_troubles, say
from attnbench.processes import invariance
from attnbench.reports import cells, grouped
from attnbench.statistics.intervals import Estimate
from attnbench.storage.events import Ladder
from attnbench.storage.invariance_events import Asked
from attnbench.storage.records import FALSE_SHARE, Verdict
from attnbench.units import MISSING, duration, percent, plain, show, significant, span

SIZES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
MOST_CERTIFIED = 3
"""Of those that are not invariant to the batch, so many are tried before there is no recommendation."""


def bytes_of(text: str) -> int:
    """A size as typed, in bytes: 512MiB, 8GiB, 8G, 1000000; "" is 0.

    Raises:
        ValueError: it is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if text and found is None:
        raise ValueError(
            f"--memory {text} is no size: give a number of bytes, or one with a unit, as in 512MiB or 8GiB"
        )
    return int(float(found[1]) * 2 ** SIZES[found[2].upper()]) if found else 0


def recommended(results: Results, limits: Limits, *, is_batch_invariant: bool = False) -> list[Recommendation]:
    """The recommendations; with `is_batch_invariant` whoever is not is excluded, and the next one tried."""
    found = recommend(results, limits)
    for _ in range(MOST_CERTIFIED if is_batch_invariant else 0):
        broken = {name: reason for each in found for name, reason in _not_invariant(results, each).items()}
        if not broken:
            break
        limits = replace(limits, without={**limits.without, **broken})
        found = recommend(results, limits)
    return found


def _not_invariant(results: Results, found: Recommendation) -> dict[str, str]:
    """The choice with the reason, where its answer depends on the batch; empty where it is invariant."""
    specs = {arm.implementation: spec for arm, spec in results.plan.specs.items()}
    if not found.choice:
        return {}
    shape = invariance.shapes((found.workload,))[0]
    asked = Asked(spec=specs[found.choice], workload=shape, baseline=results.plan.baseline, budget_s=0.0, seed=0)
    running.note(f"trying whether {found.choice} is invariant to the batch")
    certificate = invariance.certify(asked, results.plan.timeout_s, lambda _: None)
    if certificate.holds:
        return {}
    why = certificate.failed or ", ".join(law.law for law in certificate.broken) or "nothing could be tried"
    return {found.choice: f"not batch-invariant: {why}"}


def answer(found: Recommendation) -> str:
    """The recommendation in a sentence or two."""
    if not found.choice:
        return "There is nothing to recommend: no implementation is left; see what was excluded."
    alike = [name for name in found.equals if _verdict(found, name) is Verdict.equivalent]
    open_ones = [name for name in found.equals if name not in alike]
    if found.standing is not None and found.choice != found.standing.leader:
        alike = [found.standing.leader, *(name for name in alike if name != found.standing.leader)]
    slower = [name for name in found.seconds if name not in {found.choice, *found.equals, *alike}]
    own = f"PyTorch's own choice, {found.reference}"
    me = own if found.choice == found.reference else found.choice
    if not found.equals and not alike:
        text = f"Take {me}: it is the fastest" if slower else f"Take {me}: it is the only one that is left"
    elif open_ones:
        others = _listed(open_ones)
        text = f"Not clear: {me} seems to be the fastest, and {others} may be as fast"
        text += f"; equal within {_margin(found)}: {_listed(alike)}" if alike else ""
    else:
        text = f"Take {me}: it is as fast as {_listed(alike)}, within {_margin(found)}"
    parts = [_lead(found, slower[0], f"the next, {slower[0]}")] if slower else []
    if found.reference in slower[1:]:
        parts.append(_lead(found, found.reference, own))
    return ", ".join([text, " and ".join(filter(None, parts))]).rstrip(", ") + "."


def _lead(found: Recommendation, name: str, words: str) -> str:
    lead = found.lead(name)
    return "" if lead is None else f"{_factor(lead)} faster than {words}"


def _factor(ratio: Estimate) -> str:
    number, _, interval = span(ratio.point, ratio.low, ratio.high).partition(" ")
    return f"{number}x{' ' if interval else ''}{interval}"


def _margin(found: Recommendation) -> str:
    stands = found.standing
    assert stands is not None
    return percent(max((each.effect.sameness for each in stands.others.values()), default=0.0))


def _verdict(found: Recommendation, name: str) -> Verdict:
    judged = found.judgement(name)
    return Verdict.undecided if judged is None else judged.verdict


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


def of_changes(found: Recommendation) -> str:
    """From which length on the answer changes, in a sentence; "" where that was not asked."""
    if found.changes:
        return " ".join(changed(each) for each in found.changes)
    if found.looked is None or not found.choice:
        return ""
    low, high = found.looked
    if low == high:
        return "Whether the answer changes with the length is not known: there was no time to look."
    return f"Nobody else that was looked at is faster from length {low} to {high}."


def changed(change: Change) -> str:
    """One change in a sentence."""
    place = change.place
    where = f"{change.axis} {significant(place.at, 3)} on (between {place.low} and {place.high})"
    return f"From {where} {change.after} is faster than {change.before}."


def print_recommendations(results: Results, found: Sequence[Recommendation]) -> None:
    """What must be known first; then for each workload the answer, where it changes, the figures, what was excluded."""
    print_troubles(results)
    head = "doubtful: " if doubts(results) else ""
    titles = cells.titles(results)
    for each in found:
        if len(found) > 1:
            say(f"{titles[each.workload.id]}, T={cells.length(each.workload.axes())}", "bold")
        say(f"{head}{answer(each)}", "bold")
        if text := of_changes(each):
            say(f"{head}{text}")
        if VERBOSITY.is_quiet:
            continue
        if each.seconds:
            say("")
            print_table(("implementation", "time of a call", "to the choice", "peak memory"), _figures(each))
        for line in of_excluded(each):
            say(line, "dim")
        say("")
    if VERBOSITY.is_quiet:
        return
    floors = [each.standing.floor.largest_log for each in found if each.standing and each.standing.floor]
    floor = max((each for each in floors if each is not None), default=None)
    alike = "" if floor is None else f" Identical code seems up to {percent(floor)} apart here."
    say(f"Such a verdict is false in at most {percent(FALSE_SHARE)} of sessions.{alike}", "dim")
    took = "" if results.elapsed_s is None else f" It took {duration(results.elapsed_s)}."
    say(f"For this machine, these shapes and threads.{took} All of it: attnbench report {results.folder}", "dim")


def _figures(found: Recommendation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, seconds in found.seconds.items():
        lead = found.lead(name)
        to_choice = "choice" if name == found.choice else MISSING if lead is None else _factor(lead)
        mark = " (PyTorch's own)" if name == found.reference else ""
        rows.append((f"{name}{mark}", show(seconds, "s"), to_choice, show(found.peaks.get(name), "bytes")))
    return rows


def of_excluded(found: Recommendation) -> list[str]:
    """What is no candidate, a line for each kind of reason; with --verbose a line for each implementation."""
    if VERBOSITY.is_verbose:
        return [plain(f"excluded: {name}: {reason}") for name, reason in found.excluded.items()]
    kinds = grouped(found.excluded.items(), lambda item: item[1].partition(":")[0])
    lines = []
    for kind, members in kinds.items():
        only = f" ({members[0][1].partition(': ')[2]})" if len(members) == 1 and ": " in members[0][1] else ""
        lines.append(plain(f"excluded, {kind}: {', '.join(name for name, _ in members)}{only}"))
    return lines


def facts(results: Results, found: Iterable[Recommendation]) -> dict[str, Any]:
    """The same as JSON has it."""
    return {
        "run": results.run,
        "folder": str(results.folder),
        "doubts": doubts(results),
        "recommendations": [
            each.facts() | {"answer": answer(each), "changes_in_words": of_changes(each)} for each in found
        ],
    }


def conclude(results: Results, found: Sequence[Recommendation]) -> NoReturn:
    """Exit as the answer deserves: one that is not clear, or doubtful, is inconclusive; a wrong answer is a finding."""
    if any(record.is_wrong for record in results.records):
        raise typer.Exit(ExitCode.finding)
    is_settled = all(
        each.choice and all(_verdict(each, name) is Verdict.equivalent for name in _others(each)) for each in found
    )
    raise typer.Exit(ExitCode.passed if is_settled and not doubts(results) else ExitCode.inconclusive)


def _others(found: Recommendation) -> list[str]:
    leader = found.standing.leader if found.standing is not None else ""
    return [name for name in found.equals if name != leader]


def crossings(results: Results) -> list[tuple[Ladder, tuple[str, str], tuple[Change, ...]]]:
    """Every two that were searched, along each ladder, and where they change places."""
    return [
        (ladder, both, changes_along(results, ladder, both)) for ladder in results.plan.ladders for both in ladder.pairs
    ]


def of_crossing(results: Results, ladder: Ladder, both: tuple[str, str], changes: Sequence[Change]) -> str:
    """Where two change places, in a sentence; or who is faster all the way, or that it is not known."""
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


def print_crossings(results: Results) -> None:
    """For each ladder and every two the answer, and what is known at each value."""
    print_troubles(results)
    titles = cells.titles(results)
    head = "doubtful: " if doubts(results) else ""
    found = crossings(results)
    for ladder, both, changes in found:
        if len(results.plan.ladders) > 1:
            say(titles[ladder.workloads[0]], "bold")
        say(f"{head}{of_crossing(results, ladder, both, changes)}", "bold")
        known = points(results, ladder, *both)
        if known and not VERBOSITY.is_quiet:
            words = {-1: f"{both[0]} is faster", 1: f"{both[1]} is faster", 0: "not decided"}
            rows = [
                (str(value), f"{math.exp(each.log):.3f}x", words[each.sign], str(each.num_blocks))
                for value, each in sorted(known.items())
            ]
            print_table((ladder.axis, f"{both[0]} to {both[1]}", "verdict", "blocks"), rows)
    if not VERBOSITY.is_quiet:
        say(f"Such an interval is wrong in at most {percent(FALSE_SHARE)} of searches where times cross once.", "dim")
        say(f"All of it: attnbench report {results.folder}", "dim")


def crossing_facts(results: Results) -> dict[str, Any]:
    """The same as JSON has it."""
    found = [
        {
            "axis": ladder.axis,
            "workload": ladder.workloads[0],
            "implementations": list(both),
            "answer": of_crossing(results, ladder, both, changes),
            "changes": [each.facts() for each in changes],
            "points": {
                str(value): {"sign": each.sign, "log_ratio": each.log, "blocks": each.num_blocks}
                for value, each in sorted(points(results, ladder, *both).items())
            },
        }
        for ladder, both, changes in crossings(results)
    ]
    return {"run": results.run, "folder": str(results.folder), "doubts": doubts(results), "crossings": found}


def learn(results: Results, path: Path) -> None:
    """Learn a policy from what a run measured, and write it."""
    raise ValueError(f"cannot write {path} from {results.run}")
