"""A decision as lines of text, Markdown and JSON: for people, pull requests and programs."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from attnbench.analysis.gate.rulings import EVERY, Decision, Kind, Outcome, Ruling
from attnbench.analysis.gate.times import reach
from attnbench.storage.files import put, writing_to
from attnbench.storage.records import LATENCY
from attnbench.units import MISSING, escaped, markdown_table, plain, show

HEADINGS = {
    Outcome.passed: "pass",
    Outcome.improved: "pass, with improvements",
    Outcome.finding: "fail",
    Outcome.inconclusive: "inconclusive",
    Outcome.invalid: "invalid session",
}
SECTIONS = {
    Outcome.inconclusive: "could not be judged",
    Outcome.improved: "better than before",
    Outcome.passed: "no worse than before",
}
MOST_ROWS = 20
"""Rows of each table of gate.md: a comment on GitHub holds 65536 characters. gate.json holds all rulings."""


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


def compared(decision: Decision) -> str:
    """The two runs in one line."""
    base, candidate = (
        f"{side.run}{f' at {side.commit[:12]}' if side.commit else ''}" for side in (decision.base, decision.candidate)
    )
    return plain(f"base {base}, candidate {candidate}")


def terminal(decision: Decision) -> str:
    """Everything that did not pass, most urgent first, then notes and the outcome; one line each."""
    rulings = sorted(decision.rulings, key=lambda ruling: list(Outcome).index(ruling.outcome))
    lines = [
        f"{ruling.outcome}: {ruling.cell}: {ruling.metric}: {ruling.words}"
        for ruling in rulings
        if ruling.outcome is not Outcome.passed
    ]
    lines += [*decision.invalid, *decision.notes, f"suite: {decision.suite.words}", compared(decision)]
    return "\n".join(map(plain, [*lines, headline(decision)]))


def row(ruling: Ruling) -> dict[str, str]:
    """A ruling by column, each text on one line and not yet escaped."""
    base, candidate = (
        value if isinstance(value, str) else show(value, ruling.unit) for value in (ruling.base, ruling.candidate)
    )
    cells = {
        "implementation": "all" if ruling.implementation == EVERY else ruling.implementation,
        "workload": "all" if ruling.workload == EVERY else ruling.workload,
        "metric": ruling.metric,
        "base": base,
        "candidate": candidate,
        "change": MISSING if ruling.effect is None else f"{100 * (ruling.effect - 1):+.1f} %",
        "would show": MISSING if ruling.smallest is None else reach(ruling.smallest),
        "ruling": ruling.words,
    }
    return {column: plain(text) for column, text in cells.items()}


def markdown(decision: Decision) -> str:
    """A comment for a pull request: outcome and findings first, the rest folded."""
    lines = [
        f"## attnbench gate: {escaped(headline(decision))}",
        "",
        f"Compared: {escaped(compared(decision))}.",
        f"Suite: {escaped(plain(decision.suite.words))}.",
        *(f"- {escaped(text)}" for text in (*decision.invalid, *decision.notes)),
    ]
    findings = [ruling for ruling in decision.rulings if ruling.outcome is Outcome.finding]
    if findings:
        lines += ["", _table(findings)]
    for outcome, heading in SECTIONS.items():  # unchanged noise-free rulings are not listed
        news = [
            ruling
            for ruling in decision.rulings
            if ruling.outcome is outcome and (ruling.metric == LATENCY or ruling.kind is not Kind.same)
        ]
        if news:
            lines += ["", f"<details><summary>{len(news)} {heading}</summary>", "", _table(news), "", "</details>"]
    return "\n".join(lines) + "\n"


def _table(rulings: Sequence[Ruling]) -> str:
    more = f"\n\nand {len(rulings) - MOST_ROWS} more, in gate.json" if len(rulings) > MOST_ROWS else ""
    return markdown_table([row(ruling) for ruling in rulings[:MOST_ROWS]]) + more
