"""Renew the texts that are derived from results/gallery: blocks of two documents, and the gallery's page.

Command: `python docs/figures.py [RUN ...]`. The tables and pictures of the named runs (quick, full, compiled) are first
made again from their journals. The gallery is reduced to the files that are committed.

A block lies between `<!-- begin NAME -->` and `<!-- end NAME -->`. tests/test_pages.py compares blocks and pages with
their sources.
"""

import gzip
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from attnbench import plugins
from attnbench.analysis.results import read
from attnbench.reports import plotted_metrics
from attnbench.reports.screen import screen
from attnbench.storage.journal import JOURNAL, PACKED
from attnbench.units import percent, significant
from attnbench.workloads.policy import Policy

ROOT = Path(__file__).parent.parent
TRUST, FASTEST = ROOT / "docs" / "trust.md", ROOT / "docs" / "fastest.md"
GALLERY = ROOT / "results" / "gallery"
QUICK, PAGE = GALLERY / "quick", GALLERY / "README.md"
RUNS = {
    "quick": "The questions that people ask first, in minutes",
    "full": "Lengths, widths, dtypes, masks, layouts and directions, in forty minutes",
    "compiled": "One mask in five forms, and the textbook form by torch.compile",
}
"""Folders of the gallery, and their subjects."""
OTHERS = {
    "acceptance/acceptance.md": "what the method was asked to show, simulated and in real sessions, misses included",
    "acceptance/zen4.md": "two of these tests on another processor",
    "portable/README.md": "the check without Linux's own calls, and a sweep in a small container",
    "verdicts/README.md": "old runs of the gallery judged again, and why verdicts changed",
    "fastest/audit.md": "what fixed choices of an implementation cost, next to a policy that was learned",
    "detection/blind.md": "wrong and right functions by authors who had not seen the probes, and the verdict on each",
    "detection/detection.md": "which mistakes the check catches, and what it costs",
    "field/README.md": "attention of other packages, checked",
    "trust/trust.md": "cheats and contaminations: who got a time, and who was affected",
    "torture/torture.md": "what a run survives: kills, signals, damaged journals, full disks, odd surroundings",
    "places/places.md": "all tests on other instruction sets, at other addresses, and in other surroundings",
    "newest.md": "the newest versions with which the tests passed",
    "first_answer/first_answer.md": "how soon a check answers",
    "serving/pages.png": "a batch of requests in the pages of a pool",
    "memory/growth.png": "growth of memory with length, and the length at which a limit is reached",
    "report/README.md": "the page of a report in a browser, and how soon it answers with 10,000 cells",
    "tensorboard": "the views of TensorBoard, without a network",
}
FACTS = ("started", "commit", "took", "cells", "verdicts", "interference")
NUM_FIRST, FIRST_HEIGHT = 2, 1.7
"""Number of panels in the README's picture, and the height of each in inches, so that it fits the first screen."""
SCREEN = "screen.txt"
"""File with the closing screen of a run: the text that it prints at its end."""
MOST_SUMMARY = 200_000
TABLES = "The tables are left out here for their size: `attnbench report FOLDER --to DIR` writes them from the journal."
MAX_WIDTH, NUM_COLOURS = 1200, 64
"""Width in pixels and palette size of committed pictures: text and lines stay sharp, and a picture takes some 60 KB."""
REGENERATED = re.compile(r".*\.(svg|html)|records\.csv|honest\.csv\.gz|\w+_plot_\d+\.png")
"""Files that are not committed, because commands make them again: `attnbench report` makes them from a journal, and
`nox -s detection` makes honest.csv.gz. Of several pictures of one kind, only the first is committed."""


def redraw(folder: Path) -> None:
    """Rewrite the tables, the picture and the closing screen of a run from its journal."""
    results = read(folder)
    for stale in (*folder.glob("*_plot.png"), *folder.glob("winner_map*.png")):
        stale.unlink()
    closing = "".join(f"{line.text}\n" for line in screen(results))
    (folder / SCREEN).write_text(closing.replace(str(folder), f"results/runs/{results.run}"), encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        for report in plugins.plugs("attnbench.reports", "REPORT").values():
            if report.is_usual:
                report.write(results, Path(place))
        for path in Path(place).iterdir():
            if not REGENERATED.fullmatch(path.name):
                shutil.copyfile(path, folder / path.name)
    if folder == QUICK:
        picture = plotted_metrics.draw(results, plotted_metrics.RATIO, most=NUM_FIRST, height=FIRST_HEIGHT)
        assert picture is not None
        picture.save(folder / "first_plot.png")


def reduce(folder: Path) -> None:
    """Delete the files REGENERATED below `folder`, compress journals, shrink pictures, and shorten long summaries."""
    for path in sorted(folder.rglob("*")):
        if REGENERATED.fullmatch(path.name):
            path.unlink()
        elif path.name == JOURNAL:
            path.with_name(PACKED).write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            path.unlink()
        elif path.suffix == ".png":
            shrink(path)
        elif path.name == "summary.md" and path.stat().st_size > MOST_SUMMARY:
            above, _, _ = path.read_text(encoding="utf-8").partition("\n### ")
            path.write_text(f"{above}\n{TABLES}\n", encoding="utf-8")


def shrink(path: Path) -> None:
    """Reduce a picture to the width and palette of committed ones; a picture that already has them is left alone."""
    with Image.open(path) as picture:
        if picture.mode == "P" and picture.width <= MAX_WIDTH:
            return
        small = picture.convert("RGB")
    small.thumbnail((MAX_WIDTH, 10 * MAX_WIDTH), Image.Resampling.LANCZOS)
    few = small.quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def tried() -> str:
    """Summarise the outcomes of cheats and contaminations by group, or state that they have not been run yet."""
    folder = GALLERY / "trust"
    account = folder / "trust.md"
    if not account.exists():
        return "It was not run on this state of the code yet."
    summary = account.read_text(encoding="utf-8").split("\n## ")[0].splitlines()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in summary if line.startswith("|")]
    rows[1] = len(rows[0]) * ["---"]  # the separator, whose dashes are as wide as the columns of that file
    lines = [f"| {' | '.join(cell.strip() for cell in row)} |" for row in rows]
    lines += ["", "[All cases](../results/gallery/trust/trust.md), each with its reason."]
    return "\n".join(lines)


def followed() -> str:
    """Describe how much slower calls are with the stored policy's choices than with the fastest implementations."""
    policy = Policy.load(GALLERY / "fastest" / "policy.json")
    regret = policy.regret
    learned = f"[{len(policy.rows)} shapes](../results/gallery/fastest/policy.json) drawn at random on one machine"
    return (
        f"On {learned}, calls chosen by the nearest other shape are {percent(regret.mean)} slower than the fastest on "
        f"average ({percent(regret.sdpa_mean)} if PyTorch's own choice is always taken). At worst it was "
        f"{significant(1 + regret.worst, 2)}x the winner's time ({significant(1 + regret.sdpa_worst, 2)}x)."
    )


def renewed(text: str, found: dict[str, str]) -> str:
    """Replace the blocks of `text` with those in `found`, by name.

    Raises:
        ValueError: `text` has no block of that name.
    """
    for name, block in found.items():
        place = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"there is no block {name}")
        text = place.sub(lambda match, block=block: f"{match[1]}\n{block}\n\n{match[2]}", text)  # type: ignore[misc] # mypy knows no type of a default
    return text


def page() -> str:
    """Build the gallery's page: every run with its closing screen and its pictures, then links to the other pages."""
    lines = ["# Gallery", "", "Made by commands that anyone can run; `python docs/figures.py` wrote this page."]
    for name, about in RUNS.items():
        summary = GALLERY / name / "summary.md"
        if summary.exists():
            lines += ["", f"## {about}", "", *_run(name, summary.read_text(encoding="utf-8").splitlines())]
    lines += ["", "## More", ""]
    lines += [f"- [{path}]({path}): {about}" for path, about in OTHERS.items() if (GALLERY / path).exists()]
    return "\n".join([*lines, ""])


def _run(name: str, summary: list[str]) -> Iterator[str]:
    """Format a run: main facts, closing screen and pictures."""
    yield f"`nox -s gallery -- {name}` measures it again, `attnbench report results/gallery/{name} --to DIR` writes its"
    yield f"page; [tables]({name}/summary.md)."
    yield ""
    yield from (line for line in summary if any(line.startswith(f"- **{fact}**") for fact in FACTS))
    if (GALLERY / name / SCREEN).exists():
        yield from ("", "```text", (GALLERY / name / SCREEN).read_text(encoding="utf-8").rstrip(), "```")
    for picture in sorted((GALLERY / name).glob("*.png")):
        yield ""
        yield f"![{picture.stem.replace('_', ' ')} of {name}]({name}/{picture.name})"


def main(runs: Sequence[str]) -> None:
    """Make the tables and pictures of the named runs again, reduce the gallery, and renew the texts derived from it.

    Raises:
        ValueError: the gallery has no run of that name.
    """
    if unknown := set(runs) - set(RUNS):
        raise ValueError(f"there is no {', '.join(sorted(unknown))} in the gallery: choose among {', '.join(RUNS)}")
    reduce(GALLERY)
    for name in runs:
        redraw(GALLERY / name)
        reduce(GALLERY / name)
    PAGE.write_text(page(), encoding="utf-8")
    TRUST.write_text(renewed(TRUST.read_text(encoding="utf-8"), {"trust": tried()}), encoding="utf-8")
    FASTEST.write_text(renewed(FASTEST.read_text(encoding="utf-8"), {"policy": followed()}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
