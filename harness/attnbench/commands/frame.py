"""The frame of every command: options from a signature and a docstring, output as text or JSON, and the exit code.

The docstring of a command has its help, an entry for each option in the section Options, and whole command lines in the
section Examples. An entry is `parameter (FLAGS METAVAR): help`, as in `budget_s (--budget SECONDS): Time of a run.` By
default, the flag is the parameter's name without `is_`. Positional parameters are arguments. A parameter that is a
dataclass stands for all of its fields, which the docstring of the dataclass describes.
"""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import typer
from rich.console import Console

from attnbench.analysis.conclusion import Conclusion, Ending
from attnbench.commands import OUTPUT, Command, ExitCode
from attnbench.console import say
from attnbench.units import quantity, readable_json

PANELS = {
    "What": "sweep set model implementation baseline along low high memory deterministic attention layers "
    "batch-size seq-len dtype gradients invariance interpret",
    "Output": "results resume json quiet verbose to open format policy salvage",
}
"""Long names of options, or names of parameters, by the group in help; all other options are in the group How."""
LEAST = {"timeout_s": 1, "num_rounds": 1, "batch_size": 1, "seq_len": 2}
"""Smallest allowed values of numeric options; 0 for all others."""
QUANTITIES = {"SIZE": "size", "SECONDS": "duration", "SHARE": "share"}
"""Kinds of quantities by the metavar of the option; users may write the unit, as in 8GiB, 2min or 2%."""
SHARED = """Options that several commands share, and those that set the fields of `Output`, which every command has.

Options:
    results (DIR): Where runs are kept.
    resume (RUN): Continue this run (its name or folder).
    open_page (--open): Open the page in a browser.
    is_json: Print JSON for a program to read, and nothing else there.
    is_quiet (--quiet -q): Show only the answer and warnings.
    is_verbose (--verbose -v): Show each step, and every cell at the end.
"""
LINE = re.compile(r"(\w+)(?: \(([^)]*)\))?: (.*)", re.DOTALL)


def sections(text: str) -> tuple[str, dict[str, tuple[list[str], str]], list[str]]:
    """Split a docstring into help, options and examples.

    The options are keyed by parameter; each is a tuple of words (its flags and its metavar) and its help.
    """
    head, _, examples = inspect.cleandoc(text).partition("\nExamples:\n")
    words, _, lines = head.partition("\nOptions:\n")
    options = {}
    for entry in re.split(r"\n {4}(?! )", "\n" + lines.rstrip())[1:]:
        name, flags, help_text = LINE.fullmatch(entry).groups()  # type: ignore[union-attr]  # a test reads all of them
        options[name] = (flags or "").split(), " ".join(help_text.split())
    return words.strip(), options, [line.strip() for line in examples.splitlines()]


def to_typer_command(command: Command) -> tuple[Callable[..., None], list[str]]:
    """Convert a command to a function that typer can read; return it with the command's examples.

    The command's own function returns an exit code, a conclusion, or None for a pass.
    """
    function = command.function
    text, options, examples = sections(function.__doc__ or "")
    options = sections(SHARED)[1] | options
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if not is_dataclass(parameter.annotation):
            parameters.append(_parameter(parameter, *options[name]) if name in options else parameter)
            continue
        group: Any = parameter.annotation
        described: dict[str, tuple[list[str], str]] = {}
        for each in reversed(group.__mro__):
            described |= sections(each.__doc__ or "")[1]
        fields = get_type_hints(group, include_extras=True)
        groups[name] = group, list(fields)
        for field, kind in fields.items():
            default = getattr(parameter.default, field)
            member = parameter.replace(name=field, annotation=kind, default=default)
            parameters.append(_parameter(member, *described[field]) if field in described else member)
    for name in vars(OUTPUT):
        flag = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=bool, default=False)
        parameters.append(_parameter(flag, *options[name]))

    @functools.wraps(function)
    def call(**values: Any) -> None:  # noqa: ANN401 - any options
        for name in vars(OUTPUT):
            setattr(OUTPUT, name, values.pop(name))
        for name, (group, fields) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in fields})
        ended = function(**values)
        if isinstance(ended, Conclusion):
            finish(ended)
        raise typer.Exit(ended or ExitCode.passed)

    vars(call)["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__ = text
    return call, examples


def _parameter(parameter: inspect.Parameter, words: list[str], help_text: str) -> inspect.Parameter:
    """Return the parameter with an annotation from which typer makes an argument or an option."""
    kind, default = parameter.annotation, parameter.default
    metavar = " ".join(word for word in words if not word.startswith("-"))
    more: dict[str, Any] = {"help": help_text, "metavar": metavar or ("" if kind is bool else None)}
    more["show_default"] = default not in {None, ""} if default.__hash__ else True
    if metavar in QUANTITIES:
        more["parser"] = functools.partial(_quantity, QUANTITIES[metavar], LEAST.get(parameter.name, 0))
    elif {kind, *get_args(kind)} & {int, float}:
        more["min"] = LEAST.get(parameter.name, 0)
    if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return parameter.replace(annotation=Annotated[kind, typer.Argument(**more)])
    flags = [word for word in words if word.startswith("-")]
    flags = flags or [f"--{parameter.name.removeprefix('is_').replace('_', '-')}"]
    long = max(flags[0].split("/"), key=len).removeprefix("--").removeprefix("no-")
    panel = next((name for name, members in PANELS.items() if {long, parameter.name} & {*members.split()}), "How")
    return parameter.replace(annotation=Annotated[kind, typer.Option(*flags, rich_help_panel=panel, **more)])


def _quantity(kind: str, least: float, text: str | float) -> float:
    """Parse a quantity of the command line; a default that is already a number is not parsed.

    Raises:
        typer.BadParameter: `text` is not a quantity of this kind, or is below `least`.
    """
    try:
        value = quantity(text, kind) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if value < least:
        raise typer.BadParameter(f"{text} is below the least {kind}, {least:g}")
    return value


def present(facts: Callable[[], object], show: Callable[[], object]) -> None:
    """With --json, print the result of `facts` as indented JSON; otherwise call `show`."""
    if not OUTPUT.is_json:
        show()
        return
    typer.echo(readable_json(facts()))


def finish(conclusion: Conclusion, *, is_silent: bool = False) -> NoReturn:
    """Print the sentence of a conclusion, and exit with the code of its ending.

    With `is_silent`, as after a screen, the sentence goes to standard error, and only if the command did not pass.
    """
    say_conclusion(conclusion, is_silent=is_silent)
    raise typer.Exit(exit_code(conclusion))


def say_conclusion(conclusion: Conclusion, *, is_silent: bool = False) -> None:
    """Print a conclusion's sentence; with `is_silent` or --json, only if it did not pass, and to standard error."""
    is_silent |= OUTPUT.is_json
    if not is_silent or conclusion.ending is not Ending.passed:
        say(conclusion.sentence, console=Console(stderr=is_silent))


def exit_code(conclusion: Conclusion) -> ExitCode:
    """Return the exit code that has the name of the conclusion's ending."""
    return ExitCode[conclusion.ending.name]
