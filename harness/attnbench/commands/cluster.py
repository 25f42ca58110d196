"""`attnbench cluster doctor`: are the hosts of a cluster fit to measure, and comparable?"""

import json
from typing import Annotated, Literal

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson


def cluster(
    what: Annotated[Literal["doctor"], typer.Argument(help="doctor: look at every host.")] = "doctor",
    *,
    address: Annotated[
        str, typer.Option("--cluster", metavar="ADDRESS", help="As in attnbench run: auto, ray://HOST:PORT or local:N.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Look at the hosts of a Ray cluster: kind, ceilings, noise, versions, clocks, and what is not comparable."""
    import msgspec

    from attnbench.cluster import comparing
    from attnbench.cluster.examination import examinations
    from attnbench.commands import terminal

    assert what == "doctor"
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
    function=cluster,
    order=135,
    examples=(
        "attnbench cluster doctor",
        "attnbench cluster doctor --cluster local:2 --json",
    ),
)
