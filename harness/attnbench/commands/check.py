"""`attnbench check`: compare implementations with a float64 oracle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from attnbench import plugins
from attnbench.analysis.conclusion import Conclusion
from attnbench.analysis.judgements import judgements
from attnbench.analysis.results import Results, judge
from attnbench.commands import OUTPUT, Command, ExitCode, running, terminal
from attnbench.commands.frame import present
from attnbench.commands.options import SelectionOptions
from attnbench.commands.watch import watch
from attnbench.console import say
from attnbench.invariance.records import Certificate
from attnbench.processes import one_off_tasks
from attnbench.processes.execution import checking_templates
from attnbench.processes.messages import Declared
from attnbench.processes.planning import draw_seed, rejected
from attnbench.processes.worker_client import Template
from attnbench.reports import exit_status, stock
from attnbench.storage.events import Plan
from attnbench.storage.journal import Unstored
from attnbench.units import grouped
from attnbench.workloads.workload import Workload

OPTIONS = SelectionOptions(sweep="check")
STOCK = "stock"  # the sweep of --report, unless something else is selected
INVARIANCE = "seq_len=256"  # the workload of --invariance, unless others are given
INTERPRETED_SIZES = ("seq_len=70", "num_heads=2", "head_dim=16", "mask=none,causal")
"""Sizes of --interpret, unless others are given: several tiles, the last one not full."""


def check(
    *,
    options: SelectionOptions = OPTIONS,
    goes_on: bool = False,
    is_watched: bool = False,
    is_invariance: bool = False,
    is_interpreted: bool = False,
    rejects: list[str] | None = None,
    report: Path | None = None,
    repro: Path | None = None,
    replay: Path | None = None,
) -> Conclusion | ExitCode:
    """Compare outputs and gradients with a float64 oracle. Nothing is timed or stored.

    An implementation is not checked further after a wrong answer. Ctrl-C prints the findings so far.

    Options:
        goes_on (--all): Check every cell on every kind of input, even after a wrong answer.
        is_watched (--watch): Check again, on the same inputs, at each save of the file or of a module in its folder
            that it imports.
        is_invariance: Check only whether a query's answer is the same to the last bit in any batch, padding or chunk.
        is_interpreted (--interpret): Run kernels of Triton in its interpreter, without a GPU, and at small sizes.
        rejects (--reject NAME): Count as wrong what is otherwise a convention or a note: empty_rows, hidden_nan,
            products, range, float32, sign, bias, minus_infinity, lost_nan, causal, heads, or all.
        report (FILE): Write the verdicts by device and dtype, with all versions, into FILE.md. By default these are on
            PyTorch's own attention: all SDPA backends, nn.MultiheadAttention, flex and compiled.
        repro (DIR): Write a script into DIR/NAME that shows the first wrong tensor of each implementation with torch
            alone, to attach to a bug report.
        replay (FILE): Check functions on captured inputs with their strides. torch.save wrote the file: a dictionary of
            query, key, value and, if the call had them, mask, scale, is_causal and gradient; or a call on pages, with
            the names of docs/serving.md, whose numbers the check lays out in pools of its own.

    Examples:
        attnbench check mine.py:attention
        attnbench check mine.py --set mask=causal --set dtype=bfloat16 --set seq_len=128
        attnbench check mine.py:attention --watch
        attnbench check mine.py:attention --invariance --model smollm2-135m
        attnbench check my_triton.py:attention --interpret
        attnbench check --report stock.md
        attnbench check mine.py:attention --replay tensors.pt
    """
    if is_invariance and (is_interpreted or report is not None):
        raise ValueError("--invariance goes with neither --report nor --interpret: leave it out")
    if is_watched and (OUTPUT.is_json or {"--invariance", "--report", "--repro", "--replay"} & options.typed):
        raise ValueError("--watch goes with none of --json, --invariance, --report, --repro and --replay")
    options = options if report is None else _about_stock(options, report)
    options = options if options.seed is not None else replace(options, seed=draw_seed())
    asked = _Asked(
        options=options,
        goes_on=goes_on,
        is_invariance=is_invariance,
        is_interpreted=is_interpreted,
        rejects=rejected(rejects or ()),
        report=report,
        repro=repro,
        replay=replay,
    )
    return asked.answer(is_watched=is_watched)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Options of `attnbench check`, with the methods that run the check and print its verdicts."""

    options: SelectionOptions
    goes_on: bool
    is_invariance: bool
    is_interpreted: bool
    rejects: tuple[str, ...]
    report: Path | None
    repro: Path | None
    replay: Path | None

    def answer(self, *, is_watched: bool) -> Conclusion | ExitCode:
        """Check once or, with `is_watched`, again at each save until the user interrupts it."""
        limit_s, names = self.options.timeout_s, [*(self.options.names or ()), *(self.options.implementations or ())]
        with (
            TemporaryDirectory(prefix="attnbench-check-") as logs,
            checking_templates(
                Path(logs), limit_s, is_interpreted=self.is_interpreted, keeps_answers=is_watched
            ) as templates,
        ):
            if is_watched:
                watch(names, partial(self.judge, templates), templates)
            return self.judge(templates)

    def judge(self, templates: Sequence[Template]) -> Conclusion | ExitCode:
        """Read the implementations, check them in workers that the templates start, and print the verdicts."""
        options = _interpreted(self.options) if self.is_interpreted else self.options
        specs, declarations, not_judged = _usable(options, templates[0])
        options = options.with_settings(INVARIANCE) if self.is_invariance else options
        options = options if self.replay is None else _captured(options, self.replay, specs)
        planned = options.plan(
            implementations=specs,
            declarations=declarations,
            rejects=self.rejects,
            is_interpreted=self.is_interpreted,
            metrics=(),
            with_baseline=False,
        )
        if self.is_invariance:
            return _certify(planned, not_judged)
        checked = _execute(planned, templates, self.replay, goes_on=self.goes_on)
        return _conclude(checked, not_judged, self.report, self.repro)


def _execute(planned: Plan, templates: Sequence[Template], replay: Path | None, *, goes_on: bool) -> Results:
    """Check every cell of a plan, on captured inputs if `replay` is given."""
    devices = dict.fromkeys(workload.device for workload in planned.workloads)
    running.print_note(f"{planned.num_cells} cells on {', '.join(devices)}")
    if replay is not None:
        from attnbench.commands.repro import checked_captured  # needs torch

        return checked_captured(planned, replay)
    unstored, name = Unstored(), Path(planned.sweep)
    stages, stops = ["check"], not goes_on
    try:
        return running.execute(planned, name, stages, stops_when_wrong=stops, templates=templates, unstored=unstored)
    except typer.Exit:  # an interruption, perhaps after the last cell: the verdicts so far are printed
        return replace(judge(name, unstored.state), elapsed_s=None)


def _certify(planned: Plan, not_judged: Mapping[str, str]) -> ExitCode:
    """Check that each answer has the same bits in any batch, padding or chunk (its invariance); return the exit code.

    Every implementation of the plan is tried at each of the plan's shapes.
    """
    certificates = []
    for shape, spec in product(one_off_tasks.shapes(planned.workloads), planned.implementations):
        running.print_note(f"trying {spec} at {shape.id}")
        certificates.append(one_off_tasks.certify(planned, spec, shape))

    def show() -> None:
        for each in certificates:
            _print_certificate(each)
        if not OUTPUT.is_quiet:
            for spec, reason in not_judged.items():
                say(f"{spec}: not judged: {reason}", "bold yellow")
            say("\nThis holds for this machine, these shapes and these threads only.", "dim")
            say(f"Repeat with the same inputs: --seed {planned.seed}", "dim")

    present(lambda: certificates, show)
    if any(each.broken or each.failed for each in certificates):
        return ExitCode.finding
    return ExitCode.passed if certificates and all(each.holds for each in certificates) else ExitCode.inconclusive


def _print_certificate(certificate: Certificate) -> None:
    """Print whether an implementation is invariant, each law that it violates, and why other laws were not tried."""
    shape = certificate.workload
    plain, keys = Workload().axes(), f"S={shape.kv_len}"
    if shape.requests:
        axes = ("batch", "page_size", "shared_prefix", "cache_dtype", "cache_scales", "mask")
        keys = " ".join(f"{axis}={shape.axes()[axis]}" for axis in axes if shape.axes()[axis] != plain[axis])
    sizes = f"H={shape.num_heads} G={shape.num_kv_heads} K={shape.head_dim} {keys} {shape.dtype}"
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


def _conclude(
    checked: Results, not_judged: dict[str, str], report: Path | None, repro: Path | None
) -> Conclusion | ExitCode:
    """Print the verdicts, write the files of --report and --repro if these are set, and return the conclusion.

    If the check was interrupted, return the exit code instead.
    """
    if report is not None:
        stock.write(report, checked)
    conclusion = exit_status.of_check(judgements(checked), not_judged)
    running.print_report(checked, conclusion, lambda: terminal.print_check(checked, not_judged), not_judged=not_judged)
    if repro is not None:
        from attnbench.commands.repro import scripts  # needs torch

        for line in scripts(checked, repro):
            typer.echo(line, err=OUTPUT.is_json)
    if checked.elapsed_s is None:
        typer.echo(f"stopped: {len(checked.records)} of {checked.plan.num_cells} cells were checked", err=True)
        return ExitCode.interrupted
    return conclusion


def _about_stock(options: SelectionOptions, report: Path) -> SelectionOptions:
    """Return the options for --report: the sweep is `stock` unless the user selected something else.

    Raises:
        ValueError: the file does not end in .md, or its folder does not exist.
    """
    if report.suffix != stock.SUFFIX or not report.parent.is_dir():  # checked now, not after hours of work
        allowed = f"give a file that ends in {stock.SUFFIX}, in a folder that exists"
        raise ValueError(f"--report {report} is not allowed: {allowed}")
    selects = {"--sweep", "--model", "--implementation", "names"} & options.typed
    return options if selects or options.has_shapes else replace(options, sweep=STOCK)


def _captured(options: SelectionOptions, replay: Path, specs: list[str]) -> SelectionOptions:
    """Return the options for --replay: the only workload has the axes of the captured inputs.

    Raises:
        ValueError: no implementation is named, or another option selects workloads.
    """
    from attnbench.captured.replay import load, settings

    if not specs or {"--sweep", "--set", "--model", "--invariance", "--repro"} & options.typed:
        raise ValueError("--replay FILE goes with implementations alone: name them, and leave out other selections")
    return replace(options, settings=[f"{name}={value}" for name, value in settings(load(replay)).items()])


def _interpreted(options: SelectionOptions) -> SelectionOptions:
    """Return the options for --interpret: by default, sizes are small, and --call-limit equals --timeout."""
    if find_spec("triton") is None:
        raise ValueError("--interpret needs Triton, which installs without a GPU, too: pip install triton")
    limit_s = options.timeout_s if options.call_limit_s is None else options.call_limit_s
    return replace(options.with_settings(*INTERPRETED_SIZES), call_limit_s=limit_s)


def _usable(options: SelectionOptions, template: Template) -> tuple[list[str], dict[str, Declared], dict[str, str]]:
    """Return the usable specs among the named ones, the declarations by spec, and the problems by spec or name.

    Raises:
        ValueError: implementations are named, and none of them is usable.
    """
    candidates: list[str] = []
    problems: dict[str, str] = {}  # specs without a problem are still judged
    for name in (*(options.names or ()), *(options.implementations or ())):
        try:
            candidates += plugins.expand_spec(name)
        except ValueError as error:
            problems[name] = str(error)
    specs = []
    for spec in plugins.labelled(candidates):
        try:
            plugins.check_specs([spec])
            specs.append(spec)
        except ValueError as error:
            problems[spec] = str(error)
    declarations = one_off_tasks.declared(specs, template)
    problems |= {spec: each.problem for spec, each in declarations.items() if each.problem}
    specs = [spec for spec in specs if spec not in problems]
    if problems and not specs:
        raise ValueError("; ".join(problems.values()))
    return specs, declarations, problems


COMMAND = Command(check, order=20)
