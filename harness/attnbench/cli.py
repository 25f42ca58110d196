"""The command line: every command of commands/, and how a user's mistake ends."""

import sys
from importlib import metadata
from typing import Annotated

import typer

from attnbench.commands import EXIT_CODES, ExitCode
from attnbench.commands.options import flattened
from attnbench.plugins import plugs
from attnbench.units import plain

app = typer.Typer(
    name="attnbench",
    help="Which attention implementation is right, which is fast, which fits in memory: on your shapes and machine.",
    epilog=f"Exit codes: {', '.join(f'{code.value} {words}' for code, words in EXIT_CODES.items())}.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


for _name, _command in sorted(plugs("attnbench.commands", "COMMAND").items(), key=lambda item: int(item[1].order)):
    app.command(_name)(flattened(_command.function))


def _print_version(is_asked: bool) -> None:  # noqa: FBT001 - as typer calls it
    if is_asked:
        try:
            typer.echo(f"attnbench {metadata.version('attnbench')}")
        except metadata.PackageNotFoundError:
            typer.echo("attnbench, from its source: it is not installed")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Run the command; a user's mistake is one line on standard error and exit code 2."""
    try:
        app()
    except ValueError as error:
        from attnbench.storage.events import DamagedError  # here, because --help needs none of it

        is_damaged = isinstance(error, DamagedError)
        typer.echo(plain(f"{'invalid session' if is_damaged else 'error'}: {error}"), err=True)
        if is_damaged:
            sys.exit(ExitCode.invalid)
        sys.exit(ExitCode.wrong_usage)
    except OSError as error:
        typer.echo(f"error: {error}; what was finished is kept: fix this, then go on with --resume", err=True)
        sys.exit(ExitCode.wrong_usage)
