"""`attnbench check --invariance`: a certificate, or the first difference."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, NoReturn

import msgspec
import typer

from attnbench.commands import VERBOSITY, ExitCode
from attnbench.invariance.records import Certificate, LawTried
from attnbench.processes import asides
from attnbench.units import plain

if TYPE_CHECKING:
    from attnbench.storage.events import Plan


def check(planned: "Plan", not_judged: Mapping[str, str], *, as_json: bool) -> NoReturn:
    """Certify every implementation of a plan at each of its shapes, and exit with the code of the findings."""
    from attnbench.commands import running

    found = []
    for shape, spec in product(asides.shapes(planned.workloads), planned.implementations):
        running.note(f"trying {spec} at {shape.id}")
        certificate = asides.certify(planned, spec, shape)
        found.append(certificate)
        if not as_json:
            print_certificate(certificate)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    elif not VERBOSITY.is_quiet:
        print_foot(found, not_judged)
    if any(each.broken or each.failed for each in found):
        raise typer.Exit(ExitCode.finding)
    raise typer.Exit(ExitCode.passed if found and all(each.holds for each in found) else ExitCode.inconclusive)


def print_certificate(found: Certificate) -> None:
    """Print the verdict, each violated law, and untried laws."""
    from attnbench.commands.terminal import say

    shape = found.workload
    where = f"H={shape.num_heads} G={shape.num_kv_heads} K={shape.head_dim} S={shape.kv_len} {shape.dtype}"
    if found.failed:
        say(plain(f"{found.implementation} ({where}): FAILED: {found.failed}"), "bold red")
        return
    tried = [law for law in found.laws if law.num_tried and not law.broken]
    kept = ", ".join(law.law for law in tried)
    number = sum(law.num_tried for law in tried)
    if found.holds:
        text = f"{found.implementation} ({where}): the same to the last bit in {number} comparisons: {kept}"
        say(plain(text), "bold green")
    elif found.broken:
        names = ", ".join(law.law for law in found.broken)
        say(plain(f"{found.implementation} ({where}): NOT invariant: {names}"), "bold red")
        for law in found.broken:
            say(f"  {law.law}: {plain(law.broken)}")
        if kept:
            say(f"  kept: {kept}")
    else:
        say(plain(f"{found.implementation} ({where}): nothing could be tried"), "bold yellow")
    for reason, laws in _reasons(found.laws).items():
        say(f"  not tried: {', '.join(laws)}: {plain(reason)}", "dim")


def _reasons(laws: Sequence[LawTried]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for law in laws:
        if law.reason:
            found.setdefault(law.reason, []).append(law.law)
    return found


def print_foot(found: Sequence[Certificate], not_judged: Mapping[str, str]) -> None:
    """Print the scope of the certificates, and how to repeat them."""
    from attnbench.commands.terminal import say

    for spec, reason in not_judged.items():
        say(f"{spec}: not judged: {reason}", "bold yellow")
    say("")
    say("It holds for this machine, these shapes and threads, and for no others. The same inputs again:", "dim")
    say(f"--seed {found[0].seed if found else 0}", "dim")
