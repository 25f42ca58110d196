"""Attention looked at instead of measured: one small workload over the words of a sentence, a step at a time.

`look` computes, `found` is what it found, and `text`, `pictures`, `page` and `summary` show it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnbench.inspection.found import Found


def inspect(  # noqa: PLR0913 - what can be typed
    spec: str, sentences: Sequence[str], settings: Sequence[str], seed: int, folder: Path | None, *, as_json: bool
) -> tuple["Found", Path]:
    """Look, write the page and the pictures into `folder`, and print; returns what was found and the page's path.

    Raises:
        ValueError: an implementation, a sentence, a setting or a folder that cannot be.
    """
    import json

    from rich.console import Console

    from attnbench.inspection import look, page, summary, text

    found = look.look(spec, sentences, settings, seed)
    target = folder or Path("results") / "inspect" / found.implementation
    page.prepare(target)
    console = Console()
    if not as_json:
        text.write(found, console)  # pictures take seconds: there is something to read meanwhile
    files = page.write(found, target)
    if as_json:
        print(json.dumps(summary.summary(found, [str(file) for file in files]), indent=2))  # noqa: T201 - asked for
    else:
        console.print(f"\nPage and pictures: {target}", markup=False, highlight=False, soft_wrap=True)
    return found, files[0]
