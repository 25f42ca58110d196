"""The last sentence of each command and its ending, both from the marks that its tables show."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attnbench.analysis.comparisons import comparisons, doubts, is_doubtful, judgements, losses, untried, whole
from attnbench.analysis.conclusion import Conclusion, Ending, Mark, Question, conclude, factor, mark, mark_of
from attnbench.analysis.growth import Growth
from attnbench.analysis.judgements import CheckVerdict, Judgement
from attnbench.analysis.recommendation import Recommendation
from attnbench.analysis.results import Results
from attnbench.reports import answers, cells, recommended
from attnbench.storage.records import LATENCY, Arm, Verdict
from attnbench.units import percent, plain

if TYPE_CHECKING:
    from attnbench.models.events import Judged

TOGETHER = "all cells together"


def marks(results: Results, without: Collection[str] = ()) -> dict[str, Mark]:
    """The worst mark of each implementation, times apart."""
    found: dict[str, list[Mark]] = {}
    for record in results.records:
        if (each := mark_of(record)) is not None and record.implementation not in without:
            found.setdefault(plain(record.implementation), []).append(each)
    order = list(Mark)
    return {name: min(own, key=order.index) for name, own in found.items()}


def of_run(results: Results) -> Conclusion:
    """Conclude a sweep: all of it should be right, and something checked and compared."""
    found = conclude(marks(results), Question.measurement)
    is_compared = LATENCY in results.plan.metrics and results.plan.baseline and len(results.plan.specs) > 1
    if found.ending is Ending.passed and is_compared and not comparisons(results):
        return Conclusion(ending=Ending.inconclusive, words=f"{found.words}; nothing could be compared")
    if found.ending is Ending.passed and is_compared and doubts(results):
        return Conclusion(ending=Ending.inconclusive, words=f"{found.words}; no time could be judged: see the warning")
    return found


def of_check(judged: Sequence[Judgement], not_judged: Collection[str] = ()) -> Conclusion:
    """Conclude a check; `not_judged` are specs that could not be tried at all."""
    found = {plain(each.implementation): kind for each in judged if (kind := mark_of_check(each)) is not None}
    return conclude(found | dict.fromkeys(not_judged, Mark.not_judged), Question.rightness)


def mark_of_check(judged: Judgement) -> Mark | None:
    """The mark of one implementation after a check; None if it supports nothing here."""
    if judged.is_unsupported:
        return None
    kind = mark(judged.verdict, has_failed=bool(judged.failed) and not judged.compared)
    return Mark.in_part if kind in {Mark.right, Mark.imprecise} and not judged.is_enough else kind


def of_sides(results: Results) -> Conclusion:
    """Conclude a comparison of two states: lost cells, slower cells, and all cells together.

    Single cells that are undecided do not count where all of them together are decided.
    """
    judged, labels = judgements(results), answers.labels(results.plan.workloads)
    lost = {line.partition(":")[2].strip().partition(":")[0]: Mark.failed for line in losses(results)}
    found: dict[str, Mark] = dict(lost)
    details: dict[str, str] = {}
    for each in comparisons(results):
        length = cells.length(each.workload.axes())
        name = plain(f"{each.implementation} {labels[each.workload.id]} T={length}".replace("  ", " "))
        key = each.workload.id, Arm(implementation=each.implementation, side=each.side)
        found[name] = mark(CheckVerdict.right, each.verdict, is_doubtful=is_doubtful(results, key))
        details[name] = factor(each.ratio, each.low, each.high)
    together = whole(results)
    more = []
    if together is not None and len(judged) > 2:  # noqa: PLR2004 - of one cell it says the same
        found[TOGETHER] = mark(CheckVerdict.right, together.verdict, is_doubtful=is_doubtful(results))
        details[TOGETHER] = factor(together.ratio, together.low, together.high)
    if together is not None:
        is_settled = together.verdict is not Verdict.undecided
        undecided = [name for name, each in found.items() if each is Mark.undecided and name != TOGETHER]
        if is_settled and TOGETHER in found and undecided:
            found = {name: each for name, each in found.items() if name not in undecided}
            more.append(f"{len(undecided)} cells are undecided by themselves")
        if together.detectable is not None:
            more.append(f"a slowdown of {percent(together.detectable)} would have shown")
        more.append(f"differences below {percent(together.margin)} count as equal")
    found |= {plain(line.partition(": ")[2].partition(":")[0]): Mark.not_judged for line in untried(results)}
    return conclude(found, Question.change, details=details, more="; ".join(more))


def of_choice(results: Results, found: Sequence[Recommendation]) -> Conclusion:
    """Conclude recommendations: a choice is decided if nothing else may be faster and the session is quiet."""
    asked = {each.id for each in results.plan.asked}
    bad = {
        plain(record.implementation): kind
        for record in results.records
        if (kind := mark_of(record)) in {Mark.wrong, Mark.failed} and (record.is_wrong or record.workload.id in asked)
    }
    labels = answers.labels([each.workload for each in found])
    names = {id(each): f"{labels[each.workload.id]} T={cells.length(each.workload.axes())}".strip() for each in found}
    chosen = {names[id(each)]: _settled(results, each) for each in found}
    end = conclude(bad | chosen, Question.choice, details={names[id(e)]: e.choice or "none" for e in found})
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


def of_growth(results: Results, grown: Sequence[Growth]) -> Conclusion:
    """Conclude the growth of memory: wrong answers, failures, and predictions that a call refuted."""
    refuted = {plain(f"{each.implementation} near its limit"): Mark.wrong for each in grown if each.is_wrong}
    return conclude(marks(results) | refuted, Question.measurement)
