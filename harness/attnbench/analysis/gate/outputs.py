"""A decision as lines of text, Markdown and JSON: for people, pull requests and programs."""

from pathlib import Path

import msgspec

from attnbench.analysis.gate.rulings import EVERY, Decision, Outcome, Ruling
from attnbench.analysis.gate.times import reach
from attnbench.storage.files import put, writing_to
from attnbench.units import MISSING, escaped, markdown_table, plain, show

HEADINGS = {
    Outcome.passed: "pass",
    Outcome.improved: "pass, with improvements",
    Outcome.finding: "fail",
    Outcome.inconclusive: "inconclusive",
    Outcome.invalid: "invalid session",
}
MOST_ROWS = 40
"""Rows of the table of gate.md: a comment on GitHub holds 65536 characters. gate.json holds all rulings."""


def write(decision: Decision, folder: Path) -> None:
    """Write gate.md and gate.json.

    Raises:
        ValueError: the folder cannot be written.
    """
    texts = {"gate.md": markdown(decision), "gate.json": as_json(decision)}
    with writing_to(folder):
        for name, text in texts.items():
            put(folder / name, text)


def as_json(value: object) -> str:
    """Data as readable JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def headline(decision: Decision) -> str:
    """The outcome in one line."""
    return plain(f"{HEADINGS[decision.outcome]}: {decision.words}")


def context(decision: Decision) -> list[str]:
    """Reasons, notes, the verdict on all cells together, and the two runs, one line each."""
    base, candidate = (
        f"{side.run}{f' at {side.commit[:12]}' if side.commit else ''}" for side in (decision.base, decision.candidate)
    )
    suite = [] if decision.suite is None else [f"suite: {decision.suite.words}"]
    return [plain(line) for line in (*decision.invalid, *decision.notes, *suite, f"base {base}, candidate {candidate}")]


def news(decision: Decision) -> list[Ruling]:
    """The rulings that are no pass, most urgent first."""
    rulings = sorted(decision.rulings, key=lambda ruling: list(Outcome).index(ruling.outcome))
    return [ruling for ruling in rulings if ruling.outcome is not Outcome.passed]


def terminal(decision: Decision) -> str:
    """Everything that did not pass, then notes and the outcome; one line each."""
    lines = [plain(f"{one.outcome}: {one.cell}: {one.metric}: {one.words}") for one in news(decision)]
    return "\n".join([*lines, *context(decision), headline(decision)])


def markdown(decision: Decision) -> str:
    """A comment for a pull request: the outcome, notes, and a table of everything that did not pass."""
    rulings = news(decision)
    lines = [f"## attnbench gate: {escaped(headline(decision))}", ""]
    lines += [f"- {escaped(line)}" for line in context(decision)]
    if rulings:
        lines += ["", markdown_table([_row(ruling) for ruling in rulings[:MOST_ROWS]])]
    if len(rulings) > MOST_ROWS:
        lines += ["", f"and {len(rulings) - MOST_ROWS} more, in gate.json"]
    return "\n".join(lines) + "\n"


def _row(ruling: Ruling) -> dict[str, str]:
    """A ruling by column, each text on one line and not yet escaped."""
    base, candidate = (
        value if isinstance(value, str) else show(value, ruling.unit) for value in (ruling.base, ruling.candidate)
    )
    cells = {
        "outcome": str(ruling.outcome),
        "implementation": "all" if ruling.implementation == EVERY else ruling.implementation,
        "workload": "all" if ruling.workload == EVERY else ruling.workload,
        "metric": ruling.metric,
        "base": base,
        "candidate": candidate,
        "would show": MISSING if ruling.smallest is None else reach(ruling.smallest),
        "ruling": ruling.words,
    }
    return {column: plain(text) for column, text in cells.items()}
