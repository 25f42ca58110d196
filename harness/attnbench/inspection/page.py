"""An inspection as one self-contained page without scripts; weights are shaded like a picture."""

from pathlib import Path

import jinja2

from attnbench import reports
from attnbench.inspection import text, walkthrough
from attnbench.inspection.oracle_diff import Inspection
from attnbench.storage.files import put, writing_to

PAGE = "inspect.html"


def write(inspection: Inspection, folder: Path) -> Path:
    """Write inspect.html into the folder; the template escapes all text from outside.

    Raises:
        ValueError: the folder cannot be written.
    """
    loader = jinja2.FileSystemLoader([Path(__file__).parent, Path(reports.__file__).parent])
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = templates.get_template("page.html.jinja").render(
        inspection=inspection, text=text, descriptions=walkthrough.descriptions
    )
    with writing_to(folder):
        return put(folder / PAGE, page)
