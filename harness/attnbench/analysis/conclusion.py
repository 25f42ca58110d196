"""Conclude a command: derive its last sentence and its exit code from marks.

A mark, such as `slower`, is the result of one implementation or cell. Tables show the marks, the sentence counts them,
and the worst mark determines the exit code, so that all three agree.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnbench.analysis.judgements import verdict_of
from attnbench.analysis.results import Results
from attnbench.storage.records import CheckVerdict, Record, Status, Verdict
from attnbench.units import sanitize_line, span

MOST_NAMED = 3  # largest number of names that the sentence lists for each mark


class Ending(enum.StrEnum):
    """The ending of a command; it determines the exit code. The most urgent ending comes first."""

    finding = "fail"
    invalid = "invalid session"
    inconclusive = "inconclusive"
    passed = "pass"


class Mark(enum.StrEnum):
    """The result of one implementation or cell. The worst mark comes first."""

    wrong = "WRONG"
    failed = "failed"
    leaking = "keeps memory"
    slower = "slower"
    doubtful = "doubtful"
    not_judged = "not judged"
    in_part = "judged in part"
    undecided = "undecided"
    imprecise = "imprecise"
    approximate = "approximate"
    equal = "equal"
    faster = "faster"
    decided = "decided"
    right = "right"


Endings = Mapping[Mark, Ending]
"""The ending that each mark causes; marks that are not listed pass."""
IS_RIGHT: Endings = {
    **dict.fromkeys((Mark.wrong, Mark.leaking), Ending.finding),
    **dict.fromkeys((Mark.failed, Mark.in_part, Mark.not_judged), Ending.inconclusive),
}
"""Endings of `check`."""
HOW_FAST: Endings = dict.fromkeys((Mark.wrong, Mark.failed), Ending.finding)
"""Endings of `run`, `growth`, `model` and `profile`."""
WHICH_ONE: Endings = {
    **HOW_FAST,
    **dict.fromkeys((Mark.not_judged, Mark.undecided, Mark.doubtful), Ending.inconclusive),
}
"""Endings of `fastest`."""
WORSE: Endings = {**WHICH_ONE, Mark.slower: Ending.finding}
"""Endings of `compare`."""
SPEEDS = {
    Verdict.faster: Mark.faster,
    Verdict.equivalent: Mark.equal,
    Verdict.slower: Mark.slower,
    Verdict.undecided: Mark.undecided,
}
TIMED = {*SPEEDS.values(), Mark.doubtful}  # marks that judge a time


def mark(
    correct: CheckVerdict, speed: Verdict | None = None, *, is_doubtful: bool = False, has_failed: bool = False
) -> Mark:
    """Combine the verdicts on an answer and its time; if the answer is wrong, failed or unjudged, ignore the time."""
    if correct is CheckVerdict.wrong:
        return Mark.wrong
    if has_failed:
        return Mark.failed
    if correct is CheckVerdict.not_judged:
        return Mark.not_judged
    if speed is not None:
        return Mark.doubtful if is_doubtful else SPEEDS[speed]
    return Mark(correct)


def mark_of(record: Record, speed: Verdict | None = None, *, is_doubtful: bool = False) -> Mark | None:
    """Return the mark of a cell; None if it is unsupported, or was not tried because of a prediction."""
    if record.status is Status.unsupported or record.is_predicted:
        return None
    return mark(verdict_of(record), speed, is_doubtful=is_doubtful, has_failed=record.is_finding)


def marks(results: Results) -> dict[str, Mark]:
    """Return the worst mark of each implementation, by name ("mine" or, on two sides, "mine (base)"); ignore times."""
    by_name: dict[str, list[Mark]] = {}
    for record in results.records:
        if (kind := mark_of(record)) is not None:
            by_name.setdefault(sanitize_line(str(record.arm)), []).append(kind)
    order = list(Mark)
    return {name: min(members, key=order.index) for name, members in by_name.items()}


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The ending of a command, and its reason in words."""

    ending: Ending
    words: str

    @property
    def sentence(self) -> str:
        """The last line of a command: "fail: 1 of 3 WRONG (mistaken)"."""
        return sanitize_line(f"{self.ending}: {self.words}.")


def ending(marks: Sequence[Mark], endings: Endings) -> Ending:
    """Return the most urgent ending of the marks; inconclusive if there is no mark other than `not judged`.

    If all judged times of a comparison (WORSE) are doubtful, the session is invalid, unless there is a finding.
    """
    if set(marks) <= {Mark.not_judged}:
        return Ending.inconclusive
    caused = {endings.get(mark, Ending.passed) for mark in marks}
    if endings is WORSE and TIMED.intersection(marks) == {Mark.doubtful}:
        caused.add(Ending.invalid)
    return next(end for end in Ending if end in caused)


def conclude(
    marks: Mapping[str, Mark], endings: Endings, *, details: Mapping[str, str] | None = None, more: str = ""
) -> Conclusion:
    """Derive the ending and its sentence from `marks`, whose keys are the names to list in the sentence.

    `details` has a text by name, such as a factor, that follows the name; `more` follows the counts of the marks.
    """
    parts = []
    for kind in Mark:
        names = [name for name, mark in marks.items() if mark is kind]
        if not names:
            continue
        number, total = len(names), len(marks)
        every = {1: str(kind), 2: f"both {kind}"}.get(total, f"all {total} {kind}")
        text = every if number == total else f"{number} of {total} {kind}"
        if endings.get(kind, Ending.passed) is not Ending.passed or (details and total <= MOST_NAMED):
            texts = [" ".join(filter(None, [name, (details or {}).get(name, "")])) for name in names[:MOST_NAMED]]
            text += f" ({', '.join(texts)}{f' and {number - MOST_NAMED} more' * (number > MOST_NAMED)})"
        parts.append(text)
    words = ", ".join(parts) or "nothing could be judged"
    return Conclusion(ending=ending([*marks.values()], endings), words=words + (f"; {more}" if more else ""))


def factor(ratio: float, low: float | None = None, high: float | None = None, than: str = "") -> str:
    """Format a ratio of times as a factor: 0.5 as "2.00x faster", 1.1 as "1.10x slower than sdpa (1.05 to 1.15)"."""
    word = "faster" if ratio < 1.0 else "slower"
    if ratio < 1.0:
        ratio, low, high = 1 / ratio, None if high is None else 1 / high, None if low is None else 1 / low
    number, _, interval = span(ratio, low, high).partition(" ")
    return " ".join(filter(None, [f"{number}x {word}", f"than {than}" if than else "", interval]))
