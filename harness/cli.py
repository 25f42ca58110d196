"""The command line. Heavy modules are imported inside the commands, so that --help answers at once."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from harness.options import (
    Allocator,
    AllocatorMode,
    AsJson,
    Budget,
    Cache,
    CacheMode,
    CallLimit,
    Implementations,
    MemoryLimit,
    OpenPage,
    ResultsFolder,
    Seed,
    Settings,
    Timeout,
)

if TYPE_CHECKING:
    from harness.store import Results

FINDING = 1
WRONG_USAGE = 2
INCONCLUSIVE = 3
INTERRUPTED = 130

app = typer.Typer(
    name="attnbench",
    help="Which attention implementation is right, which is fast, which fits in memory: on your shapes and machine.",
    epilog="Exit codes: 0 pass, 1 a finding (disagreement, failed cell), 2 wrong usage, 3 nothing could be checked, "
    "130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class What(StrEnum):
    """What can be listed."""

    implementations = "implementations"
    sweeps = "sweeps"
    axes = "axes"
    masks = "masks"
    metrics = "metrics"
    reports = "reports"


@app.command("list")
def list_what(
    what: Annotated[What, typer.Argument(help="What to list.")] = What.implementations,
    *,
    implementation: Implementations = None,
    as_json: AsJson = False,
) -> None:
    """List what there is; for implementations, what each supports here."""
    from harness import catalog, plugins, terminal

    if what is What.implementations:
        specs = list(implementation or plugins.implementation_names())
        plugins.check_specs(specs)
        entries = catalog.implementations(specs)
    else:
        entries = catalog.entries(what)
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
    else:
        terminal.print_entries(entries)


@app.command("run")
def run_sweep(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    *,
    sweep: Annotated[str, typer.Option(metavar="NAME|FILE", help="A sweep by name, or a TOML file.")] = "quick",
    settings: Settings = None,
    implementation: Implementations = None,
    baseline: Annotated[str, typer.Option(metavar="NAME", help="What ratios are taken to.")] = "sdpa",
    budget: Budget = None,
    cache: Cache = CacheMode.warm,
    allocator: Allocator = AllocatorMode.system,
    call_limit: CallLimit = None,
    memory_limit: MemoryLimit = 0.0,
    timeout: Timeout = 60.0,
    results: ResultsFolder = Path("results"),
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with this run, as it was planned (its name or folder).")
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Sweep, check, measure, store and report."""
    from harness import plugins, run, store, terminal
    from harness.selection import Selection, plan

    if resume is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        if more := sorted(given - {"resume", "results", "as_json"}):
            raise ValueError(f"--resume goes on with the run as it was planned: leave out {', '.join(more)}")
        folder = store.find_run(resume, results)
        planned = store.read(folder).plan
        plugins.check_specs(planned.implementations)
    else:
        selection = Selection(
            sweep=sweep,
            settings=settings or (),
            implementations=implementation or (),
            baseline=baseline,
            budget_s=budget,
            call_limit_s=call_limit,
            timeout_s=timeout,
            memory_limit_bytes=int(memory_limit * 2**30),
            seed=seed,
            cache=cache,
            allocator=allocator,
        )
        planned = plan(selection)
        folder = run.new_folder(results, planned.sweep)
    typer.echo(_announcement(len(planned.workloads), len(planned.implementations), folder), err=True)
    try:
        with terminal.watching() as watch:
            found = run.execute(planned, folder, watch)
    except KeyboardInterrupt:
        typer.echo(f"stopped; go on with: attnbench run --resume {folder}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    failures = _write_reports(found, folder)
    if as_json:
        typer.echo(json.dumps(terminal.summary(found), indent=2))
    else:
        terminal.print_results(found)
        typer.echo(f"\nReports and plots: {folder}")
    _conclude(found, failures=failures)


def _announcement(num_workloads: int, num_implementations: int, folder: Path) -> str:
    plural = "" if num_implementations == 1 else "s"
    return f"{num_workloads} workloads x {num_implementations} implementation{plural}, into {folder}"


@app.command()
def check(  # noqa: PLR0913 - one parameter for each option
    implementations: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|FILE.py:NAME]...", help="What to check. Default: all.")
    ] = None,
    *,
    sweep: Annotated[str, typer.Option(metavar="NAME|FILE", help="A sweep by name, or a TOML file.")] = "check",
    settings: Settings = None,
    implementation: Implementations = None,
    call_limit: CallLimit = None,
    timeout: Timeout = 60.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Check agreement with the float64 oracle, outputs and gradients; measure nothing, keep nothing."""
    import tempfile

    from harness import run, terminal
    from harness.selection import Selection, plan

    named = [*(implementations or ()), *(implementation or ())]
    selection = Selection(
        sweep=sweep,
        settings=settings or (),
        implementations=named,
        call_limit_s=call_limit,
        timeout_s=timeout,
        metrics=(),
        seed=seed,
    )
    planned = plan(selection, with_baseline=False)
    with tempfile.TemporaryDirectory(prefix="attnbench-check-") as folder, terminal.watching() as watch:
        found = run.execute(planned, Path(folder), watch, stages=("check",))
    if as_json:
        typer.echo(json.dumps(terminal.summary(found), indent=2))
    else:
        terminal.print_check(found)
    _conclude(found, failures=False)


@app.command()
def inspect(  # noqa: PLR0913 - one parameter for each option
    name: Annotated[str, typer.Argument(metavar="[NAME|FILE.py:NAME]", help="Beside the oracle.")] = "fused",
    *,
    sentence: Annotated[list[str] | None, typer.Option(help="Words to attend over; may be repeated.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="AXIS=V", help="Heads, widths, mask.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the words' vectors and the weights.")] = 0,
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: results/inspect/NAME.")] = None,
    open_page: OpenPage = False,
    as_json: AsJson = False,
) -> None:
    """Walk a sentence step by step, with pictures of the weights, and an implementation beside the oracle."""
    from harness import inspection

    found, page = inspection.inspect(name, sentence or (), settings or (), seed, to, as_json=as_json)
    if open_page:
        typer.launch(str(page.resolve()))
    raise typer.Exit(INCONCLUSIVE if not found.is_checked else FINDING if found.differs else 0)


@app.command()
def report(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Names or folders. Default: newest.")
    ] = None,
    *,
    results: ResultsFolder = Path("results"),
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Write here, with a copy of the journal.")] = None,
    open_page: OpenPage = False,
) -> None:
    """Rebuild every report of stored runs. Needs no torch."""
    from harness import store

    folders = [store.find_run(name, results) for name in runs or ()] or [store.newest_run(results)]
    if to is not None and len(folders) > 1:
        raise ValueError("--to takes one run: name a single RUN")
    failures = False
    for folder in folders:
        found = store.read(folder)
        target = to or found.folder
        if to is not None and to.resolve() != found.folder.resolve():
            store.copy_journal(found.folder, to)
        failures |= _write_reports(found, target)
        typer.echo(f"Reports and plots: {target}")
        if open_page:
            typer.launch(str((target / "report.html").resolve()))
    _exit(has_findings=failures)


@app.command()
def doctor(*, as_json: AsJson = False) -> None:
    """Is this machine fit to measure: load, threads, timer, clocks, noise floor, with advice. Takes seconds."""
    from dataclasses import asdict

    from harness import terminal
    from harness.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        rows = [(finding.name, finding.value, finding.advice or "-") for finding in findings]
        terminal.print_table(("what", "seen", "advice"), rows)
    _exit(has_findings=any(finding.advice for finding in findings))


def _write_reports(found: "Results", folder: Path) -> bool:
    """Write every report; one that fails is told and costs the others nothing. Returns whether any failed."""
    from harness import plugins

    failed = False
    for name, plug in plugins.plugs("harness.reports", "REPORT").items():
        try:
            plug.write(found, folder)
        except Exception as error:  # noqa: BLE001 - somebody's report must not cost the others
            failed = True
            typer.echo(f"warning: report {name} failed: {type(error).__name__}: {error}", err=True)
    return failed


def _conclude(found: "Results", *, failures: bool) -> NoReturn:
    """Exit as the run deserves: a finding, or nothing that was checked at all, is no pass."""
    has_findings = failures or any(record.is_finding for record in found.records)
    if not has_findings and all(record.agreement is None for record in found.records):
        typer.echo("nothing could be checked: see the reasons above", err=True)
        raise typer.Exit(INCONCLUSIVE)
    _exit(has_findings=has_findings)


def _exit(*, has_findings: bool) -> NoReturn:
    raise typer.Exit(FINDING if has_findings else 0)


def main() -> None:
    """Run the command; a user's mistake is one line on standard error and exit code 2."""
    try:
        app()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(WRONG_USAGE)
    except OSError as error:
        typer.echo(f"error: {error}; what was finished is kept: mend it, then go on with --resume", err=True)
        sys.exit(WRONG_USAGE)
