"""`attnbench inspect`: walk through attention over one sentence, step by step."""

from pathlib import Path

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.frame import present


def inspect(
    name: str = "fused",
    *,
    sentence: str = "time flies like an arrow",
    settings: list[str] | None = None,
    to: Path | None = None,
    open_page: bool = False,
) -> ExitCode:
    """Walk through a sentence step by step, with every number, and compare an implementation with the oracle.

    Options:
        name ([NAME|FILE.py:NAME]): The implementation to compare with the oracle.
        sentence (WORDS): Words to attend over.
        settings (--set AXIS=V): Heads, widths, mask.
        to (DIR): Default: results/inspect/NAME.
    """
    from rich.console import Console

    from attnbench.inspection import text
    from attnbench.inspection.oracle_diff import inspect_implementation

    results = inspect_implementation(name, sentence, settings or ())
    file = text.write_page(results, to or Path("results") / "inspect" / results.implementation)

    def show() -> None:
        console = Console()
        text.write(results, console)
        console.print(f"\nEvery step with its numbers: {file}", markup=False, highlight=False, soft_wrap=True)

    present(lambda: text.facts(results, [file]), show)
    if open_page:
        typer.launch(str(file.resolve()))
    if not results.comparisons:
        return ExitCode.inconclusive
    return ExitCode.passed if results.first is None else ExitCode.finding


COMMAND = Command(inspect, order=210)
