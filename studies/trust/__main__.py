"""`python -m studies.trust`: run the corpus for real and write the tables. Rerun it to resume."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from studies import frame
from studies.frame import Piece
from studies.trust import outcome, sessions, table
from studies.trust.corpus import CONTROL, Case, cases, clean, control
from studies.trust.outcome import Clean, Row
from studies.trust.sessions import Session

NUM_CLEAN, NUM_CLEAN_ELSEWHERE = 8, 4
"""Sessions without any cheat, at the usual settings and at others; their range shows the noise."""


def trust(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the tables go.")] = Path("results/trust"),
    name: Annotated[str, typer.Option(help="The files' name.")] = "trust",
    family: Annotated[Literal["all", "cheats", "contaminations"], typer.Option(help="Which cases to run.")] = "all",
    only: Annotated[str, typer.Option(metavar="ID,ID", help="These cases alone.")] = "",
    *,
    short: Annotated[bool, typer.Option("--short", help="Fewer clean runs, and shorter runs.")] = False,
) -> None:
    """Run cheats and contaminations through the command line; exit code 1 if any is judged wrongly."""
    chosen = [case for case in cases() if _is_chosen(case.id, only) and _is_of(case, family)]
    if not chosen:
        raise typer.BadParameter(f"{only}: there is no such case")
    references: dict[str, Clean] = {}
    rows: list[Row] = []
    for case in chosen:
        key = "-".join(map(str, case.settings.values())) or "usual"
        if key not in references:
            number = NUM_CLEAN_ELSEWHERE if short or case.settings else NUM_CLEAN
            run = partial(sessions.run, clean(), case.settings, short=short)
            references[key] = _usable(_sessions(to, f"clean {key}", run, number))
            rows += controls(references[key], f"honest-{key}")
        run = partial(sessions.run, case.source, case.settings, short=short)
        (session,) = _sessions(to, case.id, run, 1)
        rows.append(outcome.row(case, session, references[key]))
    table.write(rows, to, name)
    bad = sum(not row.is_good for row in rows if row.group != CONTROL)
    typer.echo(f"{bad} of {len(chosen)} cases judged wrongly: {to}")
    if bad:
        raise typer.Exit(1)


def _is_chosen(name: str, only: str) -> bool:
    return not only or any(name == each or name.partition("@")[0] == each for each in only.split(","))


def _is_of(case: Case, family: str) -> bool:
    return {"all": True, "cheats": case.is_cheat, "contaminations": case.is_contamination}.get(family, False)


def _sessions(to: Path, name: str, run: Callable[[], Session], number: int) -> tuple[Session, ...]:
    """Run or read the sessions of one candidate."""
    frame.complete([Piece(name=name, make=lambda _: [msgspec.to_builtins(run())], size=number)], to)
    return msgspec.convert(tuple(frame.rows(to, name)), tuple[Session, ...])


def _usable(clean_sessions: tuple[Session, ...]) -> Clean:
    """Use the sessions as references.

    Raises:
        ValueError: an implementation has no time although none cheats.
    """
    for session in clean_sessions:
        if session.lost or any(cell.latency_s is None for cell in session.cells.values()):
            raise ValueError(f"a run without any cheat failed: {session.lost or session.cells}; is the machine idle?")
    return Clean(sessions=clean_sessions)


def controls(clean: Clean, name: str) -> list[Row]:
    """Judge each clean session by the others, as if it were a case: any error here is noise."""
    rows = []
    for number, session in enumerate(clean.sessions, start=1):
        reference = Clean(sessions=tuple(each for each in clean.sessions if each is not session))
        rows.append(outcome.row(control(f"{name}-{number}"), session, reference))
    return rows


if __name__ == "__main__":
    typer.run(trust)
