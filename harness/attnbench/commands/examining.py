"""`attnbench doctor --cluster`: are the hosts of a cluster fit to measure, and comparable?"""

import json
from typing import NoReturn

import typer

from attnbench.commands import ExitCode


def examine_hosts(address: str, *, as_json: bool) -> NoReturn:
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
