"""`python -m studies.trust`: run the corpus for real and write the tables. Rerun it to resume."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import typer

from studies import frame
from studies.trust import outcome, sessions, table, unusual
from studies.trust.corpus import CONTROL, Case, cases, clean, control
from studies.trust.outcome import Clean, Row
from studies.trust.sessions import Session
from studies.trust.unusual import Trial

Kept = TypeVar("Kept", Session, Clean, list[Trial])
NUM_CLEAN, NUM_CLEAN_ELSEWHERE = 8, 4
"""Sessions without any cheat, at the usual settings and at others; their range shows the noise."""


def trust(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the tables go.")] = Path("results/trust"),
    name: Annotated[str, typer.Option(help="The files' name.")] = "trust",
    family: Annotated[
        Literal["all", "cheats", "contaminations", "honest"], typer.Option(help="What is tried.")
    ] = "all",
    only: Annotated[str, typer.Option(metavar="ID,ID", help="These cases or forms alone.")] = "",
    *,
    short: Annotated[
        bool, typer.Option("--short", help="Fewer clean runs, shorter runs, honest forms at few shapes.")
    ] = False,
) -> None:
    """Run cheats, contaminations and honest forms through the command line; exit code 1 if any is judged wrongly."""
    chosen = [case for case in cases() if _is_chosen(case.id, only) and _is_of(case, family)]
    forms = [form for form in unusual.names() if _is_chosen(form, only)] if family in {"all", "honest"} else []
    if not chosen and not forms:
        raise typer.BadParameter(f"{only}: there is no such case")
    kept = to / "parts"
    references: dict[str, Clean] = {}
    rows: list[Row] = []
    for number, case in enumerate(chosen, start=1):
        key = "-".join(map(str, case.settings.values())) or "usual"
        if key not in references:
            references[key] = _kept(kept / f"clean-{key}.json", Clean, partial(_clean, case, short=short))
            rows += controls(references[key], f"honest-{key}")
        run = partial(sessions.run, case.source, case.settings, short=short)
        row = outcome.row(case, _kept(kept / f"{case.id}.json", Session, run), references[key])
        rows.append(row)
        frame.progress(
            f"{number} of {len(chosen)}, {row.id}: {row.outcome}: {row.reason[:90]} | {row.changed_bystanders}"
        )
    trials: list[Trial] = []
    for group, own in unusual.groups(forms).items():
        trials += _kept(kept / f"honest-{group}.json", list[Trial], partial(unusual.tried, own, short=short))
    for trial in trials:
        frame.progress(f"{trial.form}: {trial.num_right} right, {trial.num_rejected} rejected: {trial.reason[:90]}")
    table.write(rows, trials, to, name)
    shutil.rmtree(kept, ignore_errors=True)
    bad, rejected = (
        sum(not row.is_good for row in rows if row.group != CONTROL),
        sum(trial.num_rejected > 0 for trial in trials),
    )
    typer.echo(f"{bad} of {len(chosen)} cases judged wrongly, {rejected} of {len(trials)} honest forms rejected: {to}")
    if bad or rejected:
        raise typer.Exit(1)


def _is_chosen(name: str, only: str) -> bool:
    return not only or any(name == each or name.partition("@")[0] == each for each in only.split(","))


def _is_of(case: Case, family: str) -> bool:
    return {"all": True, "cheats": case.is_cheat, "contaminations": case.is_contamination}.get(family, False)


def _kept(path: Path, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
    """Read the value from the file, or compute it and write it there."""
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=kind)
    value = make()
    frame.save(path, msgspec.json.encode(value).decode())
    return value


def _clean(case: Case, *, short: bool) -> Clean:
    """Run the honest candidate at the settings of a case, several times.

    Raises:
        ValueError: an implementation has no time although none cheats.
    """
    number = NUM_CLEAN_ELSEWHERE if short or case.settings else NUM_CLEAN
    found = tuple(sessions.run(clean(), case.settings, short=short) for _ in range(number))
    for session in found:
        if session.lost or any(cell.latency_s is None for cell in session.cells.values()):
            raise ValueError(f"a run without any cheat failed: {session.lost or session.cells}; is the machine idle?")
    return Clean(sessions=found)


def controls(clean: Clean, name: str) -> list[Row]:
    """Judge each clean session by the others, as if it were a case: any error here is noise."""
    rows = []
    for number, session in enumerate(clean.sessions, start=1):
        reference = Clean(sessions=tuple(each for each in clean.sessions if each is not session))
        rows.append(outcome.row(control(f"{name}-{number}"), session, reference))
    return rows


if __name__ == "__main__":
    typer.run(trust)
