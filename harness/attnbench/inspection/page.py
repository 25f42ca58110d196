"""An inspection as one page, complete in itself, without any script; its pictures lie beside it as files too."""

from collections.abc import Mapping
from pathlib import Path

import jinja2

from attnbench import reports
from attnbench.inspection import pictures, tables
from attnbench.inspection.found import Found, Outcome
from attnbench.inspection.tables import Table
from attnbench.reports import Picture, style
from attnbench.reports.html import inlined
from attnbench.reports.words import plain

TEMPLATE = "page.html.jinja"
PAGE = "inspect.html"
STEMS = ("weights", "joined", "mask", "beside", "scaling")
MOST_COLUMNS = 32


def page(found: Found, drawn: Mapping[str, Picture]) -> str:
    """The whole document; every text from outside is escaped by the template."""
    folders = [Path(__file__).parent, Path(reports.__file__).parent]
    loader = jinja2.FileSystemLoader(folders)
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    walk = found.walks[0]
    return templates.get_template(TEMPLATE).render(
        found=found,
        lines=tables.first_difference(found),
        agreement=tables.agreement(found),
        method=tables.METHOD,
        masking=tables.masking(walk),
        saturation=tables.SATURATION,
        softness=tables.of_softness(walk),
        examples=tables.of_examples(found),
        besides=_besides(found),
        walks=[
            {
                "sentence": plain(" ".join(each.words)),
                "steps": [(step, _cut(tables.of_step(each, step))) for step in each.steps],
            }
            for each in found.walks
        ],
        figures={stem: inlined(picture, number) for number, (stem, picture) in enumerate(drawn.items(), start=1)},
        outcomes=tuple(Outcome),
    )


def _besides(found: Found) -> list[dict[str, object]]:
    """For each sentence what was compared, and the numbers of the first step that differs."""
    return [
        {
            "sentence": plain(" ".join(beside.words)),
            "rows": tables.of_comparison(beside) if beside.compared else None,
            "unseen": beside.unseen,
            "differing": _cut(tables.of_difference(beside.first, walk.labels, found.implementation))
            if beside.first is not None
            else [],
        }
        for beside, walk in zip(found.besides, found.walks, strict=True)
    ]


def _cut(found: list[Table]) -> list[Table]:
    return [table.cut(MOST_COLUMNS) for table in found]


def prepare(folder: Path) -> None:
    """Make the folder, or remove the pictures of an earlier inspection from it.

    Raises:
        ValueError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stem in STEMS:
            for suffix in (".svg", ".png"):
                (folder / stem).with_suffix(suffix).unlink(missing_ok=True)
        (folder / PAGE).write_text("", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror}; choose another folder with --to") from None


def write(found: Found, folder: Path) -> list[Path]:
    """Write inspect.html and each picture as SVG and PNG into a folder that was prepared."""
    drawn = pictures.draw(found)
    path = folder / PAGE
    path.write_text(page(found, drawn), encoding="utf-8")
    return [path, *(file for stem, picture in drawn.items() for file in style.save([picture], folder, stem))]
