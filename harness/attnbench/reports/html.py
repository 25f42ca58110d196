"""The run as one page, report.html: pictures, tables and environment, complete in itself, without any script."""

import re

from markupsafe import Markup, escape

from attnbench.analysis.results import Results
from attnbench.plugins import plugs
from attnbench.reports import Picture, cells, story, text_report


def page(results: Results) -> str:
    """The whole document; every text from outside is escaped by the template."""
    drawn = [
        picture
        for report in plugs("attnbench.reports", "REPORT").values()
        if report.draw is not None
        for picture in report.draw(results)
    ]
    return story.rendered(
        "page.html.jinja",
        results,
        figures=[inlined(picture, number) for number, picture in enumerate(drawn, start=1)],
        groups=cells.groups(results),
        columns=cells.columns(results),
    )


def inlined(picture: Picture, number: int) -> Markup:
    """A picture's SVG as part of a page: named for those who cannot see it, with identifiers of its own."""
    svg = re.sub(r'\bid="', f'id="picture{number}-', picture.svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1picture{number}-", svg)
    named = f'<svg role="img" aria-label="{escape(picture.caption)}" '
    return Markup(svg.replace("<svg ", named, 1))  # noqa: S704 - drawn by us; text in it is outlines


REPORT = text_report("report.html", "one page with pictures and tables, complete in itself", page)
