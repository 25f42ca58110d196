"""Run all cheats and contaminations, and write the table: `python -m studies.trust`.

This is the test W7 of studies.acceptance. Rerun the command to resume. `--only ID,ID` runs some cases, stores nothing
and prints their outcomes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from studies import frame
from studies.frame import Piece
from studies.trust import outcome, sessions
from studies.trust.corpus import CONTROL, cases
from studies.trust.outcome import Row
from studies.trust.sessions import Session

CASES = cases()
NAME = "W7"
"""Name of the study's only piece; studies.acceptance reads the same stored sessions."""


def take(number: int) -> list[dict[str, Any]]:
    """Run the case CASES[number], and return its session as a row."""
    case = CASES[number]
    return [{"case": case.id, "session": msgspec.to_builtins(sessions.run(case.source, case.settings))}]


def rows_of(found: Sequence[dict[str, Any]]) -> list[Row]:
    """Judge stored sessions; return a row of the table for each."""
    by_id = {each["case"]: msgspec.convert(each["session"], Session) for each in found}
    return outcome.judged(CASES, by_id)


def judge(found: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """Judge stored sessions; return a sentence with the count of each outcome, and whether all ended without harm.

    Harm is a false time, a lost run, or an effect on another implementation.
    """
    return outcome.words(rows_of(found))


def trust(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/gallery/trust"),
    parts: Annotated[
        Path, typer.Option(metavar="DIR", help="Where sessions are kept; studies.acceptance has the same.")
    ] = Path("results/gallery/acceptance"),
    only: Annotated[str, typer.Option(metavar="ID,ID", help="These cases alone; nothing is stored.")] = "",
) -> None:
    """Run cheats and contaminations; exit with 1 if one gets a false time, breaks its run or affects others."""
    from attnbench.devices import environment

    if only:
        numbers = [place for place, case in enumerate(CASES) if {case.id, case.id.split("@")[0]} & {*only.split(",")}]
        if not numbers:
            raise typer.BadParameter(f"{only}: there is no such case")
        rows = rows_of([row for number in numbers for row in take(number)])
        for row in rows:
            typer.echo(f"{row.case.id}: {row.outcome}: {row.reason} {row.affected}")
    else:
        frame.complete([Piece(name=NAME, make=take, size=len(CASES))], parts)
        rows = rows_of(frame.rows(parts, NAME))
        frame.save(to / "trust.md", outcome.markdown(rows, environment.collect().cpu))
    typer.echo(outcome.words(rows)[0])
    if not all(row.is_good for row in rows if row.case.group != CONTROL):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(trust)
