"""Options that several commands share, with their help texts."""

import functools
import inspect
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from attnbench.commands import VERBOSITY

if TYPE_CHECKING:
    from attnbench.storage.events import Plan

MOST_SEEDS = 2**31
ResultsFolder = Annotated[Path, typer.Option("--results", metavar="DIR", help="Where runs are kept.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read, and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only the answer and warnings.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show each step, and every cell at the end.")]
OpenPage = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
Resume = Annotated[str | None, typer.Option(metavar="RUN", help="Continue this run (its name or folder).")]


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """Options that select workloads, implementations and limits: parameters of build_plan."""

    sweep: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="A sweep by name (attnbench list sweeps), or a TOML file.",
        ),
    ]
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|FILE.py:NAME", help="Implementations, as -i has them; FILE.py stands for all that it holds."
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="AXIS=V,V",
            help="Values of an axis (attnbench list axes); may be repeated. Alone: exactly these. With --sweep: only "
            "its workloads with these values. device alone: the usual workloads there.",
        ),
    ] = None
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME[:PHASE]",
            help="Shapes of a model's attention: a preset (attnbench list models) or a Hugging Face config.json. "
            "PHASE is prefill (the default), decode or training.",
        ),
    ] = ""
    context: typer.Context = None  # type: ignore[assignment]  # typer passes it
    implementations: Annotated[
        list[str] | None,
        typer.Option(
            "--implementation",
            "-i",
            metavar="NAME|FILE.py:NAME",
            help="An implementation; may be repeated. NAME+compile: with torch.compile. LABEL=FILE.py:NAME: under "
            "another name. Default: those of the sweep, or all; of two sides, each file of implementations/ that "
            "differs.",
        ),
    ] = None
    call_limit_s: Annotated[
        float | None,
        typer.Option(
            "--call-limit",
            min=0.0,
            metavar="SECONDS",
            help="Leave out cells whose call is predicted to take longer. Default: the sweep's.",
        ),
    ] = None
    memory_limit: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="GIB", help="Leave out cells that need more; 0: three quarters of the free memory."
        ),
    ] = 0.0
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="Kill a step that takes longer.")
    ] = 60.0
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", show_default=False, help="Seed of inputs and of all orders. Default: drawn."),
    ] = None

    @property
    def named(self) -> list[str]:
        """Specs of the named implementations; a file stands for all implementations in it.

        Raises:
            ValueError: a file cannot be read, or has no implementation.
        """
        return [spec for name in [*(self.names or ()), *(self.implementations or ())] for spec in held(name)]

    @property
    def has_shapes(self) -> bool:
        """Whether --set or --model chooses shapes; a device alone does not."""
        return bool(self.model) or any(each.partition("=")[0].strip() != "device" for each in self.settings or ())

    def plan(self, **more: Any) -> "Plan":  # noqa: ANN401 - other parameters of build_plan
        """The plan of these options.

        Raises:
            ValueError: see `fields` and build_plan.
        """
        from attnbench.processes.planning import build_plan

        return build_plan(**self.fields(**more))

    def fields(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as of `plan`
        """The parameters of build_plan that these options set.

        Raises:
            ValueError: the memory limit is not finite.
        """
        if not math.isfinite(self.memory_limit):
            raise ValueError(f"--memory-limit {self.memory_limit} is not allowed: give GiB, 0 or more")
        on_command_line = typed(self.context) if bool(self.context) else set()
        if self.model and "--sweep" in on_command_line:
            raise ValueError("--model and --sweep: give one of them")
        others = {"memory_limit", "context", "names", "implementations", "model", "conditions"}
        values = {name: value for name, value in vars(self).items() if value is not None and name not in others}
        if "implementations" not in more:
            values["implementations"] = self.named
        values.setdefault("seed", secrets.randbelow(MOST_SEEDS))  # unpredictable inputs prove more
        values["is_exact"] = bool(self.context) and "--sweep" not in on_command_line
        values["memory_limit_bytes"] = int(self.memory_limit * 2**30)
        name, _, phase = self.model.rpartition(":")
        values |= {"model": name, "phase": phase} if phase in PHASES else {"model": self.model}
        return values | more


@dataclass(frozen=True, kw_only=True)
class TimingOptions(SelectionOptions):
    """Selection and timing options."""

    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget",
            min=0.0,
            metavar="SECONDS",
            help="Wall time of the run; it ends earlier when all is decided. Default: the sweep's.",
        ),
    ] = None
    smallest_effect: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Differences below this share count as equal. Default: the sweep's, or 0.02."
        ),
    ] = None
    num_rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            metavar="N",
            help="Fewest processes for each cell: a verdict needs 4, and a gate is good with 8.",
        ),
    ] = None
    conditions: Annotated[
        str,
        typer.Option(
            metavar="WORD,WORD",
            help="Conditions of timed calls: cold (empty caches), graph (a CUDA graph), sustained (until clocks "
            "settle), an allocator (system, steady or retain), and process or shared (one process for all code, if "
            "you trust it).",
        ),
    ] = ""

    def fields(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as of `plan`
        """The parameters of build_plan that these options set, with the conditions.

        Raises:
            ValueError: there is no such condition, two exclude each other, or see SelectionOptions.
        """
        return super().fields(**(conditions_of(self.conditions) | more))


CONDITIONS = {
    "cache": ("warm", "cold"),
    "launch": ("eager", "graph"),
    "pace": ("burst", "sustained"),
    "allocator": ("system", "steady", "retain"),
    "isolation": ("process", "shared"),
}
"""The words of --conditions, by the parameter of build_plan that they set."""
PHASES = ("prefill", "decode", "training")


def conditions_of(text: str) -> dict[str, str]:
    """Parameters of build_plan for the words of --conditions.

    Raises:
        ValueError: there is no such word, or two exclude each other.
    """
    from attnbench.plugins import unknown

    fields = {word: field for field, words in CONDITIONS.items() for word in words}
    chosen: dict[str, str] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        if word not in fields:
            raise ValueError(unknown("condition", word, fields))
        if chosen.setdefault(fields[word], word) != word:
            raise ValueError(f"--conditions {chosen[fields[word]]} and {word} exclude one another: give one of them")
    return chosen


def held(name: str) -> list[str]:
    """The specs of a name: one, or all implementations in FILE.py.

    Raises:
        ValueError: the file cannot be read, or has no implementation.
    """
    from attnbench import plugins

    if not name.endswith(".py") or "=" in name:
        return [name]
    return [f"{name}:{each}" for each in plugins.held(Path(name))]


def require_extra(module: str, extra: str) -> None:
    """Check that an optional package is installed.

    Raises:
        ValueError: it is not; the message has the command that installs it.
    """
    if find_spec(module) is None:
        raise ValueError(f'{module} is not installed: pip install "attnbench[{extra}]"')


def typed(context: typer.Context) -> set[str]:
    """Options on the command line by their long names, and arguments by their names in the code."""
    long_names = {each.name: max(each.opts, key=len) for each in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {long_names[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def flattened(function: Callable[..., None]) -> Callable[..., None]:
    """The function in a form that typer can read: each dataclass parameter is replaced by its fields.

    The parameter's default holds the defaults of the fields. Adds --quiet and --verbose to every command.
    """
    signature = inspect.signature(function)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for name, parameter in signature.parameters.items():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter)
            continue
        fields = get_type_hints(parameter.annotation, include_extras=True)
        groups[name] = parameter.annotation, list(fields)
        for field, kind in fields.items():
            default = getattr(parameter.default, field)
            parameters.append(parameter.replace(name=field, annotation=kind, default=default))
    for name, kind in {"is_quiet": Quiet, "is_verbose": Verbose}.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=False))

    @functools.wraps(function)
    def call(*, is_quiet: bool, is_verbose: bool, **values: Any) -> None:  # noqa: ANN401 - any options
        VERBOSITY.is_quiet, VERBOSITY.is_verbose = is_quiet, is_verbose
        for name, (group, fields) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in fields})
        function(**values)

    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call
