"""`attnbench doctor`: is this machine, or a cluster, fit to measure?"""

import json
from typing import Annotated, NoReturn

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
        _examine_hosts(address, as_json=as_json)
    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        rows = [(finding.name, finding.value, finding.advice or "-") for finding in findings]
        terminal.print_table(("what", "seen", "advice"), rows)
    raise typer.Exit(ExitCode.finding if any(finding.advice for finding in findings) else ExitCode.passed)


def _examine_hosts(address: str, *, as_json: bool) -> NoReturn:
    """Print the kind, ceilings, noise, versions and clocks of a cluster's hosts, and which are not comparable."""
    import msgspec

    from attnbench.cluster import comparing
    from attnbench.cluster.examination import examinations
    from attnbench.commands import terminal

    found = examinations(address)
    hosts = {each.host: each.examined for each in found if each.examined is not None}
    late_s = {each.host: each.late_s for each in found}
    lines = [f"{each.host} could not be examined: {each.error}" for each in found if each.error]
    lines += comparing.differences(hosts, late_s)
    if as_json:
        typer.echo(json.dumps({"hosts": msgspec.to_builtins(found), "findings": lines}, indent=2))
    else:
        terminal.print_table(
            comparing.COLUMNS, [comparing.row(host, each, late_s[host]) for host, each in hosts.items()]
        )
        for line in lines or ["These hosts are comparable."]:
            terminal.say(line)
    raise typer.Exit(ExitCode.finding if lines else ExitCode.passed)


COMMAND = Command(
    function=doctor,
    order=130,
    examples=(
        "attnbench doctor",
        "attnbench doctor --json",
        "attnbench doctor --cluster auto",
    ),
)
