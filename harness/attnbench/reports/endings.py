"""The last sentence of each command and its ending, both derived from the marks in its tables."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attnbench.analysis.comparisons import comparisons, failed, is_doubtful, session_doubts, untried, whole
from attnbench.analysis.conclusion import Conclusion, Ending, Mark, Question, conclude, factor, mark, mark_of
from attnbench.analysis.judgements import CheckVerdict, Judgement
from attnbench.analysis.recommendation import Recommendation, points
from attnbench.analysis.results import Results
from attnbench.reports import cells, recommended
from attnbench.storage.records import LATENCY, Arm, Verdict
from attnbench.units import percent, plain

if TYPE_CHECKING:
    from attnbench.models.records import Judged


def marks(results: Results, without: Collection[str] = ()) -> dict[str, Mark]:
    """The worst mark of each implementation, times excluded."""
    found: dict[str, list[Mark]] = {}
    for record in results.records:
        if (each := mark_of(record)) is not None and record.implementation not in without:
            found.setdefault(plain(record.implementation), []).append(each)
    order = list(Mark)
    return {name: min(own, key=order.index) for name, own in found.items()}


def of_run(results: Results) -> Conclusion:
    """Conclude a sweep: everything should be right, and something checked and compared."""
    found = conclude(marks(results), Question.measurement)
    is_compared = LATENCY in results.plan.metrics and results.plan.baseline and len(results.plan.specs) > 1
    if found.ending is Ending.passed and is_compared and not comparisons(results):
        return Conclusion(ending=Ending.inconclusive, words=f"{found.words}; nothing could be compared")
    if found.ending is Ending.passed and is_compared and session_doubts(results):
        return Conclusion(ending=Ending.inconclusive, words=f"{found.words}; no time could be judged: see the warning")
    return found


def of_check(judged: Sequence[Judgement], not_judged: Collection[str] = ()) -> Conclusion:
    """Conclude a check; `not_judged` holds specs that could not be tried."""
    found = {plain(each.implementation): kind for each in judged if (kind := mark_of_check(each)) is not None}
    return conclude(found | dict.fromkeys(not_judged, Mark.not_judged), Question.rightness)


def mark_of_check(judged: Judgement) -> Mark | None:
    """The mark of one implementation after a check; None if it supports nothing here."""
    if judged.is_unsupported:
        return None
    kind = mark(judged.verdict, has_failed=bool(judged.failed) and not judged.compared)
    return Mark.in_part if kind in {Mark.right, Mark.imprecise} and not judged.is_enough else kind


def of_sides(results: Results) -> Conclusion:
    """Conclude a comparison of two states: all cells together, then lost and slower cells.

    Undecided single cells do not count if all cells together are decided.
    """
    names, compared = cells.names(results), comparisons(results)
    assert results.plan.sides is not None
    found = dict.fromkeys(map(plain, results.plan.sides.lost), Mark.failed)
    for record, _ in failed(results):
        found[plain(f"{record.implementation} {names[record.workload.id]}")] = mark_of(record) or Mark.failed
    details: dict[str, str] = {}
    for each in compared:
        name = plain(f"{each.implementation} {names[each.workload.id]}")
        key = each.workload.id, Arm(implementation=each.implementation, side=each.side)
        found[name] = mark(CheckVerdict.right, each.verdict, is_doubtful=is_doubtful(results, key))
        details[name] = _by(each.ratio, each.low, each.high) if len(compared) == 1 else _by(each.ratio)
    found |= {line.partition(": ")[2].partition(":")[0]: Mark.not_judged for line in untried(results)}
    more = [f"differences below {percent(results.plan.smallest_effect)} count as equal"]
    together, lead, counted = whole(results), "", dict(found)
    if together is not None:
        kind = mark(CheckVerdict.right, together.verdict, is_doubtful=is_doubtful(results))
        if together.detectable is not None:
            more.insert(0, f"a slowdown of {percent(together.detectable)} would have shown")
        if len(compared) > 1:
            lead = f"{kind} over all cells, {_by(together.ratio, together.low, together.high)}; "
            decided = kind not in {Mark.undecided, Mark.doubtful}
            counted = {n: m for n, m in found.items() if not (decided and m is Mark.undecided)} | {lead: kind}
    single = conclude(found, Question.change, details=details, more="; ".join(more))
    end = conclude(counted, Question.change).ending
    return Conclusion(ending=end, words=lead + single.words)


def _by(ratio: float, low: float | None = None, high: float | None = None) -> str:
    """The factor without its word, which the mark contains: "1.10x (1.05 to 1.15)"."""
    return factor(ratio, low, high).replace(" faster", "").replace(" slower", "")


def of_choice(results: Results, found: Sequence[Recommendation]) -> Conclusion:
    """Conclude recommendations: a choice is decided if nothing else may be faster and the session is quiet."""
    asked = {each.id for each in results.plan.asked}
    bad = {
        plain(record.implementation): kind
        for record in results.records
        if (kind := mark_of(record)) in {Mark.wrong, Mark.failed} and (record.is_wrong or record.workload.id in asked)
    }
    names = cells.names(results)
    chosen = {names[each.workload.id]: _settled(results, each) for each in found}
    details = {names[each.workload.id]: each.choice for each in found}
    end = conclude(bad | chosen, Question.choice, details=details)
    if len(found) == 1 and not bad:
        answer = recommended.answer(found[0]).rstrip(".")
        return replace(end, words=f"{answer[:1].lower()}{answer[1:]}")
    return end


def _settled(results: Results, found: Recommendation) -> Mark:
    if not found.choice:
        return Mark.not_judged
    if is_doubtful(results):
        return Mark.doubtful
    leader = found.standing.leader if found.standing is not None else ""
    others = [name for name in found.equals if name != leader]
    return Mark.decided if all(found.verdict(name) is Verdict.equivalent for name in others) else Mark.undecided


def of_search(results: Results) -> Conclusion:
    """Conclude a search for the sizes at which two implementations change places."""
    found: dict[str, Mark] = {name: each for name, each in marks(results).items() if each is Mark.wrong}
    for ladder, both, _ in recommended.crossings(results):
        known = points(results, ladder, *both)
        found[" and ".join(both)] = Mark.decided if known else Mark.not_judged
    return conclude(found, Question.measurement)


def of_model(judged: Mapping[str, "Judged"], trouble: str = "") -> Conclusion:
    """Conclude a check of attention inside a model."""
    found = {}
    for name, each in judged.items():
        if each.differences:
            found[name] = Mark.wrong
        elif each.reason:
            found[name] = Mark.not_judged if each.is_refused else Mark.failed
        else:
            found[name] = Mark.right
    if trouble:
        found["timing"] = Mark.failed
    return conclude(found, Question.measurement, details={"timing": trouble})


def of_growth(results: Results) -> Conclusion:
    """Conclude the growth of memory: wrong answers and failures."""
    return conclude(marks(results), Question.measurement)
