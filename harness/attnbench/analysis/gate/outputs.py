"""Format the decision of a gate: lines for the terminal, Markdown for pull requests, and JSON for programs."""

from pathlib import Path

from attnbench.analysis.conclusion import Ending
from attnbench.analysis.gate.rulings import BETTER, Decision, Kind, Ruling
from attnbench.storage.files import write_atomically, writing_to
from attnbench.units import escaped, readable_json, sanitize_line

MOST_LINES = 100
"""Largest number of lines in gate.md, since a GitHub comment may have 65536 characters; gate.json has all rulings."""


def write(decision: Decision, folder: Path) -> None:
    """Write gate.md and gate.json into a folder.

    Raises:
        ValueError: the folder cannot be written.
    """
    texts = {"gate.md": markdown(decision), "gate.json": readable_json(decision) + "\n"}
    with writing_to(folder):
        for name, text in texts.items():
            write_atomically(folder / name, text)


def screen_lines(decision: Decision) -> list[str]:
    """List the rulings that changed something, most urgent first, then the other facts of the decision.

    The other facts are the reasons why times are invalid, the notes, the verdict on all cells together, and the two
    runs.
    """
    rulings = sorted(decision.rulings, key=lambda ruling: list(Ending).index(ruling.ending))
    news = [one for one in rulings if one.kind not in {Kind.same, Kind.new}]
    texts = [f"{_label(one)}: {one.implementation} on {one.workload}: {one.metric}: {one.words}" for one in news]
    suite = [] if decision.suite is None else [f"suite: {decision.suite.words}"]
    both = (decision.base, decision.candidate)
    base, candidate = (f"{side.run}{f' at {side.commit[:12]}' if side.commit else ''}" for side in both)
    texts += [*decision.invalid, *decision.notes, *suite, f"base {base}, candidate {candidate}"]
    return [sanitize_line(text) for text in texts]


def _label(one: Ruling) -> str:
    return "better" if one.kind in BETTER else str(one.ending)


def markdown(decision: Decision) -> str:
    """Format a comment for a pull request: the ending, then at most MOST_LINES lines of `screen_lines`."""
    items, end = [f"- {escaped(line)}" for line in screen_lines(decision)], escaped(decision.conclusion.sentence)
    more = [f"- and {len(items) - MOST_LINES} more, in gate.json"] if len(items) > MOST_LINES else []
    return "\n".join([f"## attnbench gate: {end}", "", *items[:MOST_LINES], *more]) + "\n"
