"""A decision as Markdown, short enough for a comment on a pull request: the verdict first, details folded away."""

from collections.abc import Iterator, Sequence

from attnbench.analysis.gate.rulings import LATENCY, Decision, Kind, Outcome, Ruling
from attnbench.analysis.gate.text import COLUMNS, compared, headline, row
from attnbench.text import escaped

MOST_ROWS = 20
"""In each table: a comment on GitHub holds 65536 characters. All rulings stand in gate.json."""
SECTIONS = {
    Outcome.inconclusive: "could not be judged",
    Outcome.improved: "better than before",
    Outcome.passed: "no worse than before",
}


def document(decision: Decision) -> str:
    """The whole document."""
    return "\n".join([*_head(decision), *_findings(decision), *_folded(decision)]) + "\n"


def _head(decision: Decision) -> Iterator[str]:
    yield f"## attnbench gate: {escaped(headline(decision))}"
    yield ""
    yield f"Compared: {escaped(compared(decision))}."
    yield f"Suite: {escaped(row(decision.suite)[-1])}."
    for told in (*decision.invalid, *decision.notes):
        yield f"- {escaped(told)}"


def _findings(decision: Decision) -> Iterator[str]:
    found = [ruling for ruling in decision.rulings if ruling.outcome is Outcome.finding]
    if found:
        yield ""
        yield from _table(found)


def _folded(decision: Decision) -> Iterator[str]:
    for outcome, heading in SECTIONS.items():
        found = [ruling for ruling in decision.rulings if ruling.outcome is outcome and _tells(ruling)]
        if found:
            yield ""
            yield f"<details><summary>{len(found)} {heading}</summary>"
            yield ""
            yield from _table(found)
            yield ""
            yield "</details>"


def _tells(ruling: Ruling) -> bool:
    """Whether it holds news: what is certain and as before does not."""
    return ruling.metric == LATENCY or ruling.kind is not Kind.same


def _table(rulings: Sequence[Ruling]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'|'.join(' --- ' for _ in COLUMNS)}|"
    for ruling in rulings[:MOST_ROWS]:
        yield f"| {' | '.join(escaped(cell) for cell in row(ruling))} |"
    if len(rulings) > MOST_ROWS:
        yield ""
        yield f"and {len(rulings) - MOST_ROWS} more, in gate.json"
