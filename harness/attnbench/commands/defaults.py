"""Defaults of options from ATTNBENCH_* variables, or from [tool.attnbench] of the nearest pyproject.toml.

Precedence: typed option, variable, file, built-in default. A table or variable of one command overrides those of all
commands. docs/settings.md
"""

import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attnbench import plugins
from attnbench.commands import RETIRED_OPTIONS

FILE, TABLE = "pyproject.toml", "attnbench"
PREFIX = "ATTNBENCH_"
NEVER = {"help", "version", "resume", "install-completion", "show-completion"}
"""Options without configurable defaults: they concern a single call."""
Options = Mapping[str, Mapping[str, Any]]
"""Click's parameters by command and long name without dashes."""


class Default(NamedTuple):
    """The value of an option, and its source."""

    value: Any
    source: str


def options_of(program: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - click's, of which typer may have a copy
    """Options that may have defaults, by command."""
    return {
        command: {
            name: each
            for each in made.params
            if max(each.opts, key=len).startswith("--")
            and (name := max(each.opts, key=len).removeprefix("--")) not in NEVER
        }
        for command, made in program.commands.items()
    }


def defaults(options: Options, environment: Mapping[str, str], folder: Path) -> dict[str, dict[str, Default]]:
    """Find the default of each option, by command and option.

    Raises:
        ValueError: a file cannot be read, or names an unknown option; the message names it.
    """
    found: dict[str, dict[str, Default]] = {command: {} for command in options}
    for each in (*_of_file(options, folder), *_of_environment(options, environment)):
        commands, name, default = each
        for command in commands:
            if name in options[command]:
                found[command][name] = default
    return found


def as_map(options: Options, found: Mapping[str, Mapping[str, Default]]) -> dict[str, dict[str, Any]]:
    """Defaults in click's form: by parameter, with a list for repeatable options."""
    made: dict[str, dict[str, Any]] = {}
    for command, defaults in found.items():
        for name, default in defaults.items():
            parameter, value = options[command][name], default.value
            if parameter.multiple and not isinstance(value, list):
                value = str(value).split()
            made.setdefault(command, {})[parameter.name] = value
    return made


def _of_file(options: Options, folder: Path) -> Iterator[tuple[list[str], str, Default]]:
    """Defaults from the file, those of all commands first."""
    file = next((each / FILE for each in (folder, *folder.parents) if (each / FILE).is_file()), None)
    if file is None:
        return
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get(TABLE, {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    every = sorted({name for own in options.values() for name in own})
    for name, value in table.items():
        if not isinstance(value, dict):
            if name not in every:
                raise ValueError(f"{file}: [tool.{TABLE}] {_unknown(name, every)}")
            yield list(options), name, Default(value, f"{file}: [tool.{TABLE}] {name}")
    for command, own in table.items():
        if isinstance(own, dict):
            if command not in options:
                raise ValueError(f"{file}: [tool.{TABLE}.{command}]: {plugins.unknown('command', command, options)}")
            for name, value in own.items():
                if name not in options[command]:
                    raise ValueError(f"{file}: [tool.{TABLE}.{command}] {_unknown(name, options[command])}")
                yield [command], name, Default(value, f"{file}: [tool.{TABLE}.{command}] {name}")


def _unknown(option: str, options: Collection[str]) -> str:
    """Error message for an unknown option, with its replacement."""
    replacement = RETIRED_OPTIONS.get(option)
    return f"{option} is gone: {replacement}" if replacement else plugins.unknown("option", option, options)


def _of_environment(options: Options, environment: Mapping[str, str]) -> Iterator[tuple[list[str], str, Default]]:
    """Defaults from variables, those of all commands first; variables of other programs are ignored."""
    for commands in ([*options], *([command] for command in options)):
        part = "" if len(commands) > 1 else f"{commands[0].upper()}_"
        for name in dict.fromkeys(name for command in commands for name in options[command]):
            variable = f"{PREFIX}{part}{name.upper().replace('-', '_')}"
            if environment.get(variable):
                yield commands, name, Default(environment[variable], variable)


def from_here(program: Any) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Default]]]:  # noqa: ANN401 - click's
    """Defaults for this process and its working directory, in click's form and with their sources.

    Raises:
        ValueError: see `defaults`.
    """
    options = options_of(program)
    found = defaults(options, os.environ, Path.cwd())
    return as_map(options, found), found
