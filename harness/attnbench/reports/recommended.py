"""The answers of `attnbench fastest`, with or without --along: as sentences, as rows of a table, and as JSON."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from attnbench.analysis.conclusion import factor
from attnbench.analysis.recommendation import OVER, Change, Recommendation, points, recommend
from attnbench.analysis.results import Results
from attnbench.statistics.break_even import Payoff
from attnbench.statistics.crossover import Point, find_crossovers
from attnbench.storage.events import Ladder
from attnbench.storage.records import Verdict
from attnbench.units import MISSING, grouped, listed, percent, sanitize_line, show, significant, span


def recommendation_lines(results: Results) -> list[str]:
    """Return one text for each recommendation or, after a search, for each searched pair of implementations."""
    return [crossing.answer for crossing in crossings(results)] or [*map(answer, recommend(results))]


def answer(choice: Recommendation) -> str:
    """Describe a recommendation in a sentence."""
    if not choice.choice:
        return f"There is nothing to recommend: {_nothing_left(choice)}."
    stands = choice.standing
    alike = [name for name in choice.equals if choice.verdict(name) is Verdict.equivalent]
    undecided = [name for name in choice.equals if name not in alike]
    if stands is not None and choice.choice != stands.leader:
        alike = list(dict.fromkeys([stands.leader, *alike]))
    margin = percent(max((each.margin for each in stands.others.values()), default=0.0)) if stands else MISSING
    slower = [name for name in choice.seconds if name not in {choice.choice, *choice.equals, *alike}]
    reference = f"PyTorch's own choice, {choice.reference}"
    name = reference if choice.choice == choice.reference else choice.choice
    if undecided:
        text = f"Not clear: {name} seems to be the fastest, and {listed(undecided)} may be as fast"
        text += f"; equal within {margin}: {listed(alike)}" if alike else ""
    elif alike:
        text = f"Take {name}: it is as fast as {listed(alike)}, within {margin}"
    else:
        alone = "the only one left" if choice.excluded else "the only candidate"
        text = f"Take {name}: it is {'the fastest' if slower else alone}"
    leads = [_lead(choice, slower[0], f"the next, {slower[0]}")] if slower else []
    leads += [_lead(choice, choice.reference, reference)] if choice.reference in slower[1:] else []
    link = ", and " if alike and not undecided else ", "
    return link.join(filter(None, [text, " and ".join(filter(None, leads))])) + f"{_paid(choice)}."


def _paid(choice: Recommendation) -> str:
    """Say when a long first call pays off: ", and has paid for its first call of 5 s after 90 calls".

    The text is "" if the first call is not long or not measured, or if it pays off at once or never.
    """
    found = choice.break_even
    if found is None or not choice.has_long_first_call or found.payoff in {Payoff.at_once, Payoff.never}:
        return ""
    cost = f"its first call of {show(choice.first_s[choice.choice], 's')}"
    if found.payoff is Payoff.unknown:
        return f"; it is unknown after how many calls it has paid for {cost}"
    return f", and has paid for {cost} after {found.words}"


def _nothing_left(choice: Recommendation) -> str:
    """Explain why nothing is recommended: the least memory that would be needed, or else the kinds of exclusions."""
    over = {name: choice.peaks[name] for name, why in choice.excluded.items() if why.kind == OVER}
    if over:
        least = min(over, key=lambda name: over[name])
        return f"{least}, the implementation with the least memory, needs {show(over[least], 'bytes')}"
    if not choice.excluded:
        return "no implementation was timed"
    return f"all are excluded ({', '.join(dict.fromkeys(why.kind for why in choice.excluded.values()))})"


def _lead(choice: Recommendation, other: str, words: str) -> str:
    """State how much faster the choice is: "1.20x (1.15 to 1.25) faster than the next, fused"; "" if unknown."""
    lead = choice.lead(other)
    if lead is None:
        return ""
    number, *interval = span(lead.ratio, lead.low, lead.high).split(" ", 1)
    return " ".join([f"{number}x", *interval, f"faster than {words}"])


def figures(choice: Recommendation) -> list[tuple[str, ...]]:
    """Return one row of texts for each candidate: name, time of a call, factor relative to the choice, peak memory.

    A candidate's time is the choice's time multiplied by `Lead.ratio`, since medians from different moments are not
    comparable.
    """
    rows: list[tuple[str, ...]] = []
    for name, median_s in choice.seconds.items():
        lead = choice.lead(name)
        seconds = median_s if lead is None or not choice.choice else choice.seconds[choice.choice] * lead.ratio
        to_choice = MISSING if lead is None else factor(lead.ratio, lead.low, lead.high)
        to_choice = "choice" if name == choice.choice else to_choice
        remark = " (PyTorch's own)" if name == choice.reference else ""
        rows.append((f"{name}{remark}", show(seconds, "s"), to_choice, show(choice.peaks.get(name), "bytes")))
    return rows


def of_excluded(choice: Recommendation, *, is_verbose: bool = False) -> list[str]:
    """List excluded implementations: a line for each kind of reason or, if `is_verbose`, for each implementation."""
    if is_verbose:
        return [sanitize_line(f"excluded: {name}: {reason}") for name, reason in choice.excluded.items()]
    texts = []
    for kind, names in grouped(choice.excluded, lambda name: choice.excluded[name].kind).items():
        reason = choice.excluded[names[0]].detail
        head = kind if kind.startswith("not ") else f"excluded, {kind}"
        texts.append(sanitize_line(f"{head}: {', '.join(names)}{f' ({reason})' if reason and len(names) == 1 else ''}"))
    return texts


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """The values of an axis at which the faster one of two implementations changes."""

    axis: str
    workload: str
    implementations: tuple[str, str]
    answer: str
    changes: tuple[Change, ...]
    points: dict[int, Point]


def crossings(results: Results) -> Iterator[Crossing]:
    """Yield the crossovers of each searched pair along each ladder (a workload at increasing values of an axis)."""
    for ladder, pair in ((each, pair) for each in results.plan.ladders for pair in each.pairs):
        known = points(results, ladder, *pair)
        changes = tuple(
            Change(ladder.axis, place.at, place.low, place.high, *(pair if place.sign > 0 else pair[::-1]))
            for place in find_crossovers(known)
        )
        yield Crossing(
            axis=ladder.axis,
            workload=ladder.workloads[0],
            implementations=pair,
            answer=_crossing(ladder, pair, known, changes),
            changes=changes,
            points=dict(sorted(known.items())),
        )


def _crossing(ladder: Ladder, pair: tuple[str, str], known: Mapping[int, Point], changes: Sequence[Change]) -> str:
    """Describe the crossovers of two implementations; if there are none, name the faster one, if that is decided."""
    if changes:
        return " ".join(
            f"From {change.axis} {significant(change.at, 3)} on (between {change.low} and {change.high}) "
            f"{change.after} is faster than {change.before}."
            for change in changes
        )
    decided = {value: point.sign for value, point in known.items() if point.sign}
    if not known:
        again = f"raise --budget, or run attnbench check {pair[0]} {pair[1]}"
        return f"{pair[0]} and {pair[1]} have no common samples at any {ladder.axis}: {again}."
    if not decided:
        return f"It is undecided which of {listed(pair)} is faster, {_span(ladder, known)}."
    winner, loser = pair if next(iter(decided.values())) < 0 else pair[::-1]
    where = f"wherever it is decided, {_span(ladder, decided)}"
    text = f"{winner} is faster than {loser} {where}; they do not change places there."
    beyond = [value for value in (ladder.values[0], ladder.values[-1]) if value not in decided]
    return f"{text} Not decided: {ladder.axis} {', '.join(map(str, beyond))}." if beyond else text


def _span(ladder: Ladder, values: Mapping[int, object]) -> str:
    low, high = min(values), max(values)
    return f"at {ladder.axis} {low}" if low == high else f"from {ladder.axis} {low} to {high}"
