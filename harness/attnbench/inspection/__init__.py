"""Attention looked at instead of measured: one small workload over the words of a sentence, step by step.

`walkthrough` and `oracle_diff` compute, `results` holds what they computed, `text` and `page` show it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnbench.inspection.results import Inspection

MOST_JOINED_WORDS = 48


def look(name: str, sentences: Sequence[str], settings: Sequence[str] = (), seed: int = 0) -> "Inspection":
    """Inspect the implementation `name` (or path/to/file.py:Name) on these sentences.

    Raises:
        ValueError: an implementation that cannot be found, a sentence without words, or settings that cannot be.
    """
    from attnbench import plugins
    from attnbench.inspection import oracle_diff, walkthrough
    from attnbench.inspection.results import Inspection

    plugins.check_specs([name])
    parted = walkthrough.split(sentences or [walkthrough.DEFAULT])
    points = [walkthrough.workload(len(words), settings, seed) for words in parted]
    implementation = oracle_diff.load(name)
    given = [walkthrough.inputs(words, point) for words, point in zip(parted, points, strict=True)]
    together = list(zip(parted, points, given, strict=True))
    joined = None
    row = tuple(word for words in parted for word in words)
    if len(parted) > 1 and len(row) <= MOST_JOINED_WORDS:  # all in one row, where every word sees every other
        point = walkthrough.workload(len(row), settings, seed, mask="none")
        joined = walkthrough.walk(row, point, walkthrough.inputs(row, point))
    return Inspection(
        spec=name,
        implementation=plugins.name_of(name),
        walks=tuple(walkthrough.walk(*each) for each in together),
        diffs=tuple(oracle_diff.compare(implementation, *each) for each in together),
        joined=joined,
        examples=walkthrough.examples(),
        growth=walkthrough.growth(seed),
    )


def inspect(  # noqa: PLR0913 - what can be typed
    spec: str, sentences: Sequence[str], settings: Sequence[str], seed: int, folder: Path | None, *, as_json: bool
) -> tuple["Inspection", Path]:
    """Look, write the page and the pictures into `folder`, and print; returns the results and the page's path.

    Raises:
        ValueError: an implementation, a sentence, a setting or a folder that cannot be.
    """
    import json

    from rich.console import Console

    from attnbench.inspection import page, text

    inspection = look(spec, sentences, settings, seed)
    target = folder or Path("results") / "inspect" / inspection.implementation
    page.prepare(target)
    console = Console()
    if not as_json:
        text.write(inspection, console)  # pictures take seconds: there is something to read meanwhile
    files = page.write(inspection, target)
    if as_json:
        summary = inspection.json(text.first_difference(inspection), [str(file) for file in files])
        print(json.dumps(summary, indent=2))  # noqa: T201 - asked for
    else:
        console.print(f"\nPage and pictures: {target}", markup=False, highlight=False, soft_wrap=True)
    return inspection, files[0]
