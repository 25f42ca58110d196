"""The run as one page, report.html: pictures, tables and environment, complete in itself, without any script."""

import re
from collections.abc import Iterator
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from attnbench.analysis.results import Results
from attnbench.analysis.table import LENGTHS, Row
from attnbench.plugins import plugs
from attnbench.reports import Picture, Report, notable, story
from attnbench.reports.cells import columns, groups, legend
from attnbench.storage.records import Status

TEMPLATE = "page.html.jinja"


def page(results: Results) -> str:
    """The whole document; every text from outside is escaped by the template."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return templates.get_template(TEMPLATE).render(
        facts=story.facts(results),
        findings=story.findings(results),
        troubles=story.troubles(results),
        notable=notable.findings(results),
        figures=[inlined(picture, number) for number, picture in enumerate(_pictures(results), start=1)],
        conclusions=story.conclusions(results),
        groups=groups(results),
        columns=columns(results),
        legend=legend(results),
        row_classes=_row_classes,
        has_moved=story.has_moved(results),
        environments=[story.described(environment) for environment in story.environments(results).values()],
    )


def inlined(picture: Picture, number: int) -> Markup:
    """A picture's SVG as part of a page: named for those who cannot see it, with identifiers of its own."""
    svg = re.sub(r'\bid="', f'id="picture{number}-', picture.svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1picture{number}-", svg)
    named = f'<svg role="img" aria-label="{escape(picture.caption)}" '
    return Markup(svg.replace("<svg ", named, 1))  # noqa: S704 - drawn by us; text in it is outlines


def _pictures(results: Results) -> Iterator[Picture]:
    """Those of every report that draws any."""
    for report in plugs("attnbench.reports", "REPORT").values():
        if report.draw is not None:
            yield from report.draw(results)


def _row_classes(row: Row, previous: Row | None) -> str:
    """How a row looks: what went wrong, and whether a new length begins."""
    kind = "predicted" if row["is_predicted"] else row["status"]
    failed = "" if row["status"] in {Status.ok, Status.unsupported} or row["is_predicted"] else "failed"
    begins = previous is not None and any(previous[axis] != row[axis] for axis in LENGTHS)
    return " ".join(name for name in (kind, failed, "first" if begins else "") if name)


def write(results: Results, folder: Path) -> list[Path]:
    """Write report.html."""
    path = folder / "report.html"
    path.write_text(page(results), encoding="utf-8")
    return [path]


REPORT = Report(summary="one page with pictures and tables, complete in itself", write=write)
