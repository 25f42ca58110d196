"""The run as summary.md: what was run and where, what went wrong, and a table for each group of workloads."""

from attnbench.analysis.results import Results
from attnbench.reports import cells, story, text_report
from attnbench.units import markdown_table


def summary(results: Results) -> str:
    """The whole document."""
    columns = cells.columns(results)
    tables = {
        title: markdown_table([{column.heading: column.text(row) for column in columns} for row in rows])
        for title, rows in cells.groups(results).items()
    }
    return story.rendered("summary.md.jinja", results, tables=tables).rstrip("\n") + "\n"


REPORT = text_report("summary.md", "the whole run as a readable text with tables", summary)
