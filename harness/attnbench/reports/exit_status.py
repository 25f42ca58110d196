"""The last sentence of each command and its ending (pass, fail, ...), both derived from the marks in its tables."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attnbench.analysis.comparisons import comparisons, is_doubtful, session_doubts, whole_session_judgement
from attnbench.analysis.conclusion import (
    HOW_FAST,
    IS_RIGHT,
    MOST_NAMED,
    WHICH_ONE,
    WORSE,
    Conclusion,
    Ending,
    Mark,
    conclude,
    factor,
    mark,
    mark_of,
    marks,
)
from attnbench.analysis.judgements import Judgement
from attnbench.analysis.recommendation import Recommendation
from attnbench.analysis.results import Results
from attnbench.analysis.sides import by_side, failed, matched, untried
from attnbench.reports import recommended, titles
from attnbench.storage.records import LATENCY, CheckVerdict, Verdict
from attnbench.units import percent, sanitize_line

if TYPE_CHECKING:
    from attnbench.models.records import Judged


def of_run(results: Results) -> Conclusion:
    """Return the conclusion of a sweep, which passes if no answer is wrong and no cell failed.

    A sweep that should compare times is inconclusive if it compared none, or if all of its times are doubtful.
    """
    end = conclude(marks(results), HOW_FAST)
    is_compared = LATENCY in results.plan.metrics and results.plan.baseline and len(results.plan.specs) > 1
    if end.ending is not Ending.passed or not is_compared:
        return end
    if not comparisons(results):
        return Conclusion(ending=Ending.inconclusive, words=f"nothing could be compared (answers: {end.words})")
    if session_doubts(results):
        return Conclusion(ending=Ending.inconclusive, words=f"{end.words}; no time could be judged: see the warning")
    return end


def of_check(judged: Sequence[Judgement], not_judged: Collection[str] = ()) -> Conclusion:
    """Return the conclusion of a check from its judgements, one for each implementation.

    `not_judged` has the specs that could not be loaded. Unsupported implementations do not count.
    """
    by_name = dict[str, Mark]()
    for each in judged:
        kind = mark(each.verdict, has_failed=bool(each.failed) and not each.compared)
        is_partial = kind in {Mark.right, Mark.imprecise} and not each.is_enough
        if not each.is_unsupported:
            by_name[sanitize_line(each.implementation)] = Mark.in_part if is_partial else kind
            if each.keeps and kind is not Mark.wrong:
                by_name[sanitize_line(each.implementation)] = Mark.leaking
    return conclude(by_name | dict.fromkeys(not_judged, Mark.not_judged), IS_RIGHT)


def of_sides(results: Results) -> Conclusion:
    """Return the conclusion of a comparison of two states of the code, from each cell and from all cells together.

    An undecided cell does not count if the verdict on all cells together is decided.
    """
    names, compared, details = titles.names(results), comparisons(results), dict[str, str]()
    assert results.plan.sides is not None
    by_name = dict.fromkeys(map(sanitize_line, results.plan.sides.lost), Mark.failed)
    for record, _ in failed(results):
        by_name[sanitize_line(f"{record.implementation} {names[record.workload.id]}")] = mark_of(record) or Mark.failed
    for match in matched(*by_side(results)):
        if match.base is not None and match.base.is_finding and (fixed := match.candidate) and fixed.agreement:
            name = sanitize_line(f"{fixed.implementation} {names[fixed.workload.id]}")
            by_name.setdefault(name, mark_of(fixed) or Mark.not_judged)
            details[name] = f"where the base is {mark_of(match.base)}"
    for each in compared:
        name = sanitize_line(f"{each.implementation} {names[each.workload.id]}")
        by_name[name] = kind = mark(CheckVerdict.right, each.verdict, is_doubtful=each.is_doubtful)
        details[name] = _by(kind, each.ratio, *((each.low, each.high) if len(compared) == 1 else ()))
    by_name |= dict.fromkeys(map(sanitize_line, untried(results)), Mark.not_judged)
    if not by_name:
        return Conclusion(ending=Ending.inconclusive, words=f"nothing could be judged: {_reasons(results)}")
    more = [f"differences below {percent(results.plan.smallest_effect)} count as equal"]
    together, lead, counted = whole_session_judgement(results), "", dict(by_name)
    if together is not None:
        kind = mark(CheckVerdict.right, together.verdict, is_doubtful=together.is_doubtful)
        if together.detectable is not None and kind is not Mark.doubtful:
            more.insert(0, f"a slowdown of {percent(together.detectable)} would have been detected")
        if len(compared) > 1:
            lead = f"{kind} over all cells, {_by(kind, together.ratio, together.low, together.high)}; "
            decided = kind not in {Mark.undecided, Mark.doubtful}
            counted = {n: m for n, m in by_name.items() if not (decided and m is Mark.undecided)} | {lead: kind}
    single = conclude(by_name, WORSE, details=details, more="; ".join(more))
    end = conclude(counted, WORSE).ending
    return Conclusion(ending=end, words=lead + single.words)


def _reasons(results: Results) -> str:
    """List the reasons why cells have no result, the most frequent reason first."""
    reasons = Counter(f"{each.implementation}: {each.message or each.status}" for each in results.records)
    texts = [f"{sanitize_line(reason)} ({number} cell{'s' * (number > 1)})" for reason, number in reasons.most_common()]
    more = [f"{len(texts) - MOST_NAMED} more reasons"] * (len(texts) > MOST_NAMED)
    return "; ".join([*texts[:MOST_NAMED], *more]) or "nothing was tried"


def _by(kind: Mark, ratio: float, low: float | None = None, high: float | None = None) -> str:
    """Format a ratio as a factor without the word of its mark: "1.10x (1.05 to 1.15)" for the mark `slower`."""
    return factor(ratio, low, high).replace(f" {kind}", "")


def of_choice(results: Results, choices: Sequence[Recommendation]) -> Conclusion:
    """Return the conclusion of `attnbench fastest` from its recommendations, and from wrong or failed implementations.

    There is one recommendation for each workload. It is decided if the session is not doubtful, and no implementation
    that may be as fast has an undecided verdict.
    """
    planned = {workload.id for workload in results.plan.asked}
    bad = {
        sanitize_line(record.implementation): kind
        for record in results.records
        if (kind := mark_of(record)) in {Mark.wrong, Mark.failed} and (record.is_wrong or record.workload.id in planned)
    }
    names = titles.names(results)
    decided = {names[each.workload.id]: _settled(results, each) for each in choices}
    details = {names[each.workload.id]: each.choice for each in choices}
    end = conclude(bad | decided, WHICH_ONE, details=details)
    if len(choices) == 1 and not bad:
        answer = recommended.answer(choices[0]).rstrip(".")
        return replace(end, words=f"{answer[:1].lower()}{answer[1:]}")
    return end


def _settled(results: Results, choice: Recommendation) -> Mark:
    if not choice.choice:
        return Mark.not_judged
    if is_doubtful(results):
        return Mark.doubtful
    leader = choice.standing.leader if choice.standing is not None else ""
    others = {choice.verdict(name) for name in choice.equals if name != leader}
    return Mark.decided if others <= {Verdict.equivalent} else Mark.undecided


def of_search(results: Results) -> Conclusion:
    """Return the conclusion of a search for the sizes at which the faster one of two implementations changes."""
    by_name = dict[str, Mark]((name, kind) for name, kind in marks(results).items() if kind is Mark.wrong)
    for crossing in recommended.crossings(results):
        signs = {point.sign for point in crossing.points.values()}
        kind = Mark.not_judged if not signs else Mark.undecided if signs == {0} else Mark.decided
        by_name[" and ".join(crossing.implementations)] = kind
    return conclude(by_name, WHICH_ONE)


def of_model(judged: Mapping[str, "Judged"], trouble: str = "") -> Conclusion:
    """Return the conclusion of a check of attention inside a model; if timing failed, `trouble` says why."""
    by_name = {"timing": Mark.failed} if trouble else {}
    for name, each in judged.items():
        if each.reason and not each.differences:
            by_name[name] = Mark.not_judged if each.is_refused else Mark.failed
        else:
            by_name[name] = Mark.wrong if each.differences else Mark.right
    return conclude(by_name, HOW_FAST, details={"timing": trouble})
