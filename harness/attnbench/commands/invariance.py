"""`attnbench check --invariance`: a certificate, or the first difference."""

from collections.abc import Mapping
from itertools import product

from attnbench.commands import OUTPUT, ExitCode, running
from attnbench.commands.frame import present
from attnbench.commands.terminal import say
from attnbench.invariance.records import Certificate
from attnbench.processes import asides
from attnbench.reports import grouped
from attnbench.storage.events import Plan


def check(planned: Plan, not_judged: Mapping[str, str]) -> ExitCode:
    """Certify every implementation of a plan at each of its shapes, and return the code of the findings."""
    certificates = []
    for shape, spec in product(asides.shapes(planned.workloads), planned.implementations):
        running.note(f"trying {spec} at {shape.id}")
        certificates.append(asides.certify(planned, spec, shape))

    def show() -> None:
        for each in certificates:
            print_certificate(each)
        if not OUTPUT.is_quiet:
            for spec, reason in not_judged.items():
                say(f"{spec}: not judged: {reason}", "bold yellow")
            say("\nIt holds for this machine, these shapes and threads, and for no others.", "dim")
            say(f"The same inputs again: --seed {planned.seed}", "dim")

    present(lambda: certificates, show)
    if any(each.broken or each.failed for each in certificates):
        return ExitCode.finding
    return ExitCode.passed if certificates and all(each.holds for each in certificates) else ExitCode.inconclusive


def print_certificate(certificate: Certificate) -> None:
    """Print the verdict, each violated law, and untried laws."""
    shape = certificate.workload
    sizes = f"H={shape.num_heads} G={shape.num_kv_heads} K={shape.head_dim} S={shape.kv_len} {shape.dtype}"
    head = f"{certificate.implementation} ({sizes}):"
    tried = [law for law in certificate.laws if law.num_tried and not law.broken]
    if certificate.failed:
        say(f"{head} FAILED: {certificate.failed}", "bold red")
        return
    if certificate.holds:
        number, intact = sum(law.num_tried for law in tried), ", ".join(law.law for law in tried)
        say(f"{head} the same to the last bit in {number} comparisons: {intact}", "bold green")
    elif certificate.broken:
        say(f"{head} NOT invariant: {', '.join(law.law for law in certificate.broken)}", "bold red")
    else:
        say(f"{head} nothing could be tried", "bold yellow")
    for law in certificate.broken:
        say(f"  {law.law}: {law.broken}")
    for reason, laws in grouped(certificate.laws, lambda law: law.reason).items():
        if reason:
            say(f"  not tried: {', '.join(law.law for law in laws)}: {reason}", "dim")
