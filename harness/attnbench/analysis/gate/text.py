"""Rulings as rows of text, most urgent first: what every output shows."""

from attnbench.analysis.gate.rulings import EVERY, Decision, Outcome, Ruling
from attnbench.analysis.gate.times import reach
from attnbench.text import plain
from attnbench.units import MISSING, show

URGENCY = (Outcome.finding, Outcome.invalid, Outcome.inconclusive, Outcome.improved, Outcome.passed)
HEADINGS = {
    Outcome.passed: "pass",
    Outcome.improved: "pass, with improvements",
    Outcome.finding: "fail",
    Outcome.inconclusive: "inconclusive",
    Outcome.invalid: "invalid session",
}
COLUMNS = ("implementation", "workload", "metric", "base", "candidate", "change", "would see", "says")


def headline(decision: Decision) -> str:
    """The verdict, in one line."""
    return plain(f"{HEADINGS[decision.outcome]}: {decision.words}")


def compared(decision: Decision) -> str:
    """Which two runs, in one line."""
    told = [
        f"{side.run}{f' at {side.commit[:12]}' if side.commit else ''}" for side in (decision.base, decision.candidate)
    ]
    return plain(f"base {told[0]}, candidate {told[1]}")


def sorted_rulings(decision: Decision) -> list[Ruling]:
    """All rulings but the suite's, most urgent first, else as they were."""
    return sorted(decision.rulings, key=lambda ruling: URGENCY.index(ruling.outcome))


def row(ruling: Ruling) -> tuple[str, ...]:
    """One ruling under COLUMNS, on one line, as text from outside that is not yet escaped."""
    cells = (
        "all" if ruling.implementation == EVERY else ruling.implementation,
        "all" if ruling.workload == EVERY else ruling.workload,
        ruling.metric,
        _value(ruling.base, ruling.unit),
        _value(ruling.candidate, ruling.unit),
        _change(ruling),
        MISSING if ruling.smallest is None else reach(ruling.smallest),
        ruling.words,
    )
    return tuple(plain(cell) for cell in cells)


def line(ruling: Ruling) -> str:
    """One ruling as a line for a terminal or a log."""
    return plain(f"{ruling.outcome}: {ruling.cell}: {ruling.metric}: {ruling.words}")


def _value(value: float | str | None, unit: str) -> str:
    return value if isinstance(value, str) else show(value, unit)


def _change(ruling: Ruling) -> str:
    return MISSING if ruling.effect is None else f"{100 * (ruling.effect - 1):+.1f} %"
