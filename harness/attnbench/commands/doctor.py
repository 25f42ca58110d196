"""`attnbench doctor`: is this machine, or a cluster, fit to measure?"""

import json
from typing import Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson


def doctor(
    *,
    address: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="ADDRESS",
            help="Look at every host of a Ray cluster, and whether they are comparable: auto, HOST:PORT or local:N.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Is this machine fit to measure: load, threads, timer, clocks, noise floor, with advice. Takes fifteen seconds."""
    from dataclasses import asdict

    from attnbench.commands import terminal
    from attnbench.timing.doctor import examine

    if address:
        from attnbench.commands import examining

        examining.examine_hosts(address, as_json=as_json)
    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        rows = [(finding.name, finding.value, finding.advice or "-") for finding in findings]
        terminal.print_table(("what", "seen", "advice"), rows)
    raise typer.Exit(ExitCode.finding if any(finding.advice for finding in findings) else ExitCode.passed)


COMMAND = Command(
    function=doctor,
    order=130,
    examples=(
        "attnbench doctor",
        "attnbench doctor --json",
        "attnbench doctor --cluster auto",
    ),
)
