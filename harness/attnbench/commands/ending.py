"""How commands end: their exit codes, and what a run is worth."""

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from attnbench.analysis.results import Results

FINDING = 1
WRONG_USAGE = 2
INCONCLUSIVE = 3
INVALID = 4
INTERRUPTED = 130


def write_reports(found: "Results", folder: Path) -> bool:
    """Write every report; one that fails is told and costs the others nothing. Returns whether any failed."""
    from attnbench import plugins

    failed = False
    for name, plug in plugins.plugs("attnbench.reports", "REPORT").items():
        try:
            plug.write(found, folder)
        except Exception as error:  # noqa: BLE001 - somebody's report must not cost the others
            failed = True
            typer.echo(f"warning: report {name} failed: {type(error).__name__}: {error}", err=True)
    return failed


def conclude(found: "Results", *, failures: bool) -> NoReturn:
    """Exit as the run deserves: a finding, or nothing that was checked at all, is no pass."""
    has_findings = failures or any(record.is_finding for record in found.records)
    if not has_findings and all(record.agreement is None for record in found.records):
        typer.echo("nothing could be checked: see the reasons above", err=True)
        raise typer.Exit(INCONCLUSIVE)
    leave(has_findings=has_findings)


def leave(*, has_findings: bool) -> NoReturn:
    """Exit with 1 where something was found, and with 0 where not."""
    raise typer.Exit(FINDING if has_findings else 0)
