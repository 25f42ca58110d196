"""The run as summary.md: what was run and where, what went wrong, and a table for each group of workloads."""

import html
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnbench.analysis.results import Results
from attnbench.reports import Report, story
from attnbench.reports.surprises import surprises
from attnbench.reports.table import COLUMNS, LEGEND, Row, groups


def escaped(text: str) -> str:
    """Text from outside as one cell of a table: no pipe, tag or emphasis takes effect."""
    return re.sub(r"([\\`|*\[\]~$])", r"\\\1", html.escape(text, quote=False))


def summary(results: Results) -> str:
    """The whole document."""
    parts = (_head, _findings, _surprises, _tables, _environments)
    return "\n".join(line for part in parts for line in part(results))


def _head(results: Results) -> Iterator[str]:
    yield f"# Attention benchmark: {escaped(story.facts(results)['run'])}"
    yield ""
    yield from _list(story.facts(results))
    if results.elapsed_s is None:
        yield ""
        yield "**This run did not come to its end**: what is missing below was not measured."


def _findings(results: Results) -> Iterator[str]:
    found = story.findings(results)
    yield ""
    yield "## Findings"
    yield ""
    yield from (f"- {escaped(line)}" for line in found or ["none: no cell disagreed or failed"])


def _surprises(results: Results) -> Iterator[str]:
    found = surprises(results)
    if found:
        yield from ("", "## Surprises", "")
    yield from (f"- **{name}**: {escaped(text)}" for name, text in found.items())


def _tables(results: Results) -> Iterator[str]:
    yield ""
    yield "## Results"
    yield ""
    for heading, lines in story.conclusions(results).items():
        yield f"{heading}:"
        yield ""
        yield from (f"- {escaped(line)}" for line in lines)
        yield ""
    yield LEGEND
    for group, members in groups(results).items():
        yield ""
        yield f"### {escaped(group)}"
        yield ""
        yield from _table(members)


def _table(members: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'|'.join(' --- ' for _ in COLUMNS)}|"
    for row in members:
        yield f"| {' | '.join(escaped(row.cells[column]) for column in COLUMNS)} |"


def _environments(results: Results) -> Iterator[str]:
    found = story.environments(results)
    yield ""
    yield "## Environment"
    yield ""
    if not found or story.has_moved(results):
        yield "The machine changed during this run: times are not comparable." if found else "No environment is known."
        yield ""
    for environment in found.values():
        yield from _list(story.described(environment))
        yield ""


def _list(told: dict[str, str]) -> Iterator[str]:
    yield from (f"- **{name}**: {escaped(text)}" for name, text in told.items())


def write(results: Results, folder: Path) -> list[Path]:
    """Write summary.md."""
    path = folder / "summary.md"
    path.write_text(summary(results), encoding="utf-8")
    return [path]


REPORT = Report(summary="the whole run as a readable text with tables", write=write)
