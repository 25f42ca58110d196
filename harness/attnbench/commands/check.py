"""`attnbench check`: is it right?"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from msgspec import structs

from attnbench import plugins
from attnbench.commands import Command
from attnbench.commands.options import AsJson, SelectionOptions, held, typed

if TYPE_CHECKING:
    from attnbench.analysis.results import Results
    from attnbench.processes.worker_client import Template
    from attnbench.storage.events import Plan

OPTIONS = SelectionOptions(sweep="check")
STOCK = "stock"
"""The sweep of --report, unless something else is selected."""
INVARIANCE = "seq_len=256"
"""The workload of --invariance, unless others are given."""
INTERPRETED_SIZES = ("seq_len=70", "num_heads=2", "head_dim=16", "mask=none,causal")
"""Sizes of --interpret, unless others are given: several tiles, the last one not full."""


def check(
    *,
    options: SelectionOptions = OPTIONS,
    goes_on: Annotated[bool, typer.Option("--all", help="Check every cell, even after a wrong answer.")] = False,
    is_invariance: Annotated[
        bool,
        typer.Option(
            "--invariance",
            help="Is a query's answer the same to the last bit whatever the batch, the padding, the chunk, the heads?",
        ),
    ] = False,
    is_interpreted: Annotated[
        bool,
        typer.Option(
            "--interpret",
            help="Run kernels of Triton in its interpreter, on the CPU, without a GPU; at small sizes, unless --set "
            "gives others.",
        ),
    ] = False,
    empty_rows: Annotated[
        Literal["any", "zero"],
        typer.Option(help="zero: a query that sees no key must get 0; NaN, or the mean of the values, is a finding."),
    ] = "any",
    hidden_nan: Annotated[
        Literal["note", "reject"],
        typer.Option(
            help="reject: a NaN in a key or value that a query does not see, as in an unused part of a cache, must not "
            "reach its output."
        ),
    ] = "note",
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the verdicts by device and dtype, with all versions, into FILE.md. Alone: on "
            "PyTorch's own attention, all SDPA backends, nn.MultiheadAttention, flex and compiled.",
        ),
    ] = None,
    repro: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a script into DIR/NAME that shows the first wrong tensor of each implementation with torch "
            "alone, to attach to a bug report.",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Check functions on captured inputs with their strides: a dictionary that torch.save wrote, of query, "
            "key, value, and if the call had them mask, scale, is_causal and gradient.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare outputs and gradients with a float64 oracle. Nothing is timed or stored.

    An implementation is not checked further after a wrong answer. Ctrl-C prints the findings so far.
    """
    from attnbench.processes.execution import checking_template

    if is_invariance and (is_interpreted or report is not None):
        raise ValueError("--invariance goes with neither --report nor --interpret: leave it out")
    if report is not None:
        options = _reported(report, options)
    specs, not_judged = _usable([*(options.names or ()), *(options.implementations or ())])
    with (
        TemporaryDirectory(prefix="attnbench-check-") as name,
        checking_template(folder := Path(name), options.timeout_s, is_interpreted=is_interpreted) as template,
    ):
        from attnbench.commands import running
        from attnbench.processes.asides import declared
        from attnbench.processes.planning import rejected

        declarations = declared(plugins.labelled(specs), template)
        if broken := {spec: each.problem for spec, each in declarations.items() if each.problem}:
            specs = [spec for spec in plugins.labelled(specs) if spec not in broken]
            not_judged |= broken
            if not specs:
                raise ValueError("; ".join(not_judged.values()))
        if is_interpreted:
            options = _interpreted(options)
        if replay is not None:
            options = _captured(replay, options, specs)
        more: dict[str, Any] = {"implementations": specs, "metrics": (), "with_baseline": False}
        if is_invariance:
            from attnbench.commands import invariance  # slow to import

            if not options.has_shapes:
                options = replace(options, settings=[INVARIANCE, *(options.settings or ())])
                more["is_exact"] = True
            invariance.check(options.plan(**more), not_judged, as_json=as_json)
        rejects = rejected(empty_rows=empty_rows, hidden_nan=hidden_nan)
        planned = structs.replace(
            options.plan(declarations=declarations, rejects=rejects, **more), is_interpreted=is_interpreted
        )
        running.note(
            f"{planned.num_cells} cells on {', '.join(dict.fromkeys(each.device for each in planned.workloads))}"
        )
        checked, stopped = _checked(planned, folder, template, replay, goes_on=goes_on)
    from attnbench.analysis.judgements import judgements  # only now: slow to import
    from attnbench.commands import terminal
    from attnbench.commands.repro import scripts
    from attnbench.reports import endings, stock

    if report is not None:
        stock.write(report, checked)
    conclusion = endings.of_check(judgements(checked), not_judged)
    if as_json:
        running.print_report(checked, conclusion, not_judged=not_judged)
    else:
        terminal.print_check(checked, not_judged)
    for line in scripts(checked, planned, repro, options.timeout_s) if repro is not None else ():
        typer.echo(line, err=as_json)
    if stopped is not None:
        typer.echo(f"stopped: {len(checked.records)} of {planned.num_cells} cells were checked", err=True)
        raise stopped
    running.finish(conclusion, is_silent=as_json)


def _reported(report: Path, options: SelectionOptions) -> SelectionOptions:
    """Options for a report: the sweep `stock`, unless anything else is selected.

    Raises:
        ValueError: the file cannot be written.
    """
    from attnbench.reports import stock

    stock.require_suffix(report)
    selects = {"--sweep", "--model", "--implementation", "names"} & typed(options.context)
    return options if selects or options.has_shapes else replace(options, sweep=STOCK)


def _checked(
    planned: "Plan", folder: Path, template: "Template", replay: Path | None, *, goes_on: bool
) -> "tuple[Results, typer.Exit | None]":
    """Check every cell, or the captured inputs; return the results, and the interruption if there was one."""
    from attnbench.analysis.results import read
    from attnbench.commands import running

    if replay is not None:
        from attnbench.commands import replay as captured  # needs torch

        return captured.checked(planned, planned.implementations, replay, folder), None
    try:
        return running.execute(planned, folder, stages=["check"], stops_when_wrong=not goes_on, template=template), None
    except typer.Exit as interrupted:
        return read(folder), interrupted


def _captured(replay: Path, options: SelectionOptions, specs: list[str]) -> SelectionOptions:
    """Options for captured inputs: their sizes are the only workload.

    Raises:
        ValueError: they cannot be loaded, or something else is selected.
    """
    from attnbench.checking.replay import load, settings

    if not specs or {"--sweep", "--set", "--model", "--invariance", "--repro"} & typed(options.context):
        raise ValueError("--replay FILE goes with implementations alone: name them, and leave out other selections")
    return replace(options, settings=[f"{name}={value}" for name, value in settings(load(replay)).items()])


def _interpreted(options: SelectionOptions) -> SelectionOptions:
    """Options for Triton's interpreter: small sizes by default, and longer timeouts.

    Raises:
        ValueError: Triton is missing.
    """
    if find_spec("triton") is None:
        raise ValueError("--interpret needs Triton, which installs without a GPU, too: pip install triton")
    settings = options.settings if options.has_shapes else [*INTERPRETED_SIZES, *(options.settings or ())]
    limit_s = options.timeout_s if options.call_limit_s is None else options.call_limit_s
    return replace(options, settings=settings, call_limit_s=limit_s)


def _usable(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """The usable specs, with a file expanded to its implementations, and the reasons against the others.

    Raises:
        ValueError: none is usable, although some were given.
    """
    specs: list[str] = []
    problems: dict[str, str] = {}  # the others are still judged
    for name in names:
        try:
            candidates = plugins.labelled(held(name))
        except ValueError as error:
            problems[name] = str(error)
            continue
        for spec in candidates:
            try:
                plugins.check_specs([spec])
                specs.append(spec)
            except ValueError as error:
                problems[spec] = str(error)
    if problems and not specs:
        raise ValueError("; ".join(problems.values()))
    return specs, problems


COMMAND = Command(
    function=check,
    order=30,
    examples=(
        "attnbench check mine.py:attention",
        "attnbench check mine.py --set mask=causal --set dtype=bfloat16 --set seq_len=128",
        "attnbench check fused -i mine.py --all",
        "attnbench check mine.py:attention --invariance --model smollm2-135m",
        "attnbench check my_triton.py:attention --interpret",
        "attnbench check --report stock.md",
        "attnbench check mine.py:attention --replay tensors.pt",
    ),
)
