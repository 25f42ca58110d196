"""The run as summary.md: what was run and where, what went wrong, and a table for each group of workloads."""

from collections.abc import Iterator
from pathlib import Path

from attnbench.analysis.results import Results
from attnbench.reports import Report, notable, story
from attnbench.reports.cells import columns, groups, legend
from attnbench.units import escaped, markdown_list, markdown_table


def summary(results: Results) -> str:
    """The whole document."""
    return "\n\n".join(_parts(results)) + "\n"


def _parts(results: Results) -> Iterator[str]:
    """Its paragraphs."""
    facts = story.facts(results)
    yield f"# Attention benchmark: {escaped(facts['run'])}"
    yield from (f"**{escaped(line)}**" for line in story.troubles(results))
    yield markdown_list(facts)
    yield "## Findings"
    yield _bullets(story.findings(results) or ["none: no cell disagreed or failed"])
    if found := notable.findings(results):
        yield "## Notable findings"
        yield markdown_list(found)
    yield "## Results"
    for heading, lines in story.conclusions(results).items():
        yield f"{heading}:"
        yield _bullets(lines)
    yield legend(results)
    shown = columns(results)
    for title, rows in groups(results).items():
        yield f"### {escaped(title)}"
        yield markdown_table([{column.heading: column.text(row) for column in shown} for row in rows])
    yield "## Environment"
    environments = story.environments(results)
    if not environments:
        yield "No environment is known."
    elif story.has_moved(results):
        yield "The machine changed during this run: times are not comparable."
    for environment in environments.values():
        yield markdown_list(story.described(environment))


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)


def write(results: Results, folder: Path) -> list[Path]:
    """Write summary.md."""
    path = folder / "summary.md"
    path.write_text(summary(results), encoding="utf-8")
    return [path]


REPORT = Report(summary="the whole run as a readable text with tables", write=write)
