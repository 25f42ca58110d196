"""The command line: it registers the commands of the folder commands/, and handles errors."""

import os
import shlex
import signal
import sys
import traceback
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

from attnbench.commands import EXIT_CODES, RETIRED, ExitCode
from attnbench.commands.frame import to_typer_command
from attnbench.devices import platforms
from attnbench.plugins import plugs
from attnbench.units import sanitize_line


class Plain(TyperCommand):
    """A command whose help shows no types of arguments, and lists --help in the group Output."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - click's, of which typer may have a copy
        """Return all parameters, --help included, after changing how the help shows them."""
        parameters = super().get_params(ctx)
        for each in parameters:
            if isinstance(each, TyperArgument):
                vars(each)["display_type_rich"] = lambda ctx: ""  # noqa: ARG005 - its signature
            elif each.name == "help":
                each.metavar, vars(each)["rich_help_panel"] = "", "Output"
        return parameters


app = typer.Typer(
    name="attnbench",
    help="Which attention implementation is right, which is fast, which fits in memory: on your shapes and machine.",
    epilog=f"Exit codes: {', '.join(f'{code.value} {words}' for code, words in EXIT_CODES.items())}.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PANELS = ("Measure and check", "Read stored runs", "Look inside", "Look up")
"""Groups of commands in the help. Commands with an `order` below 100 are in the first group, those with an `order` from
100 to 199 in the second, and so on."""

for _name, _command in sorted(plugs("attnbench.commands", "COMMAND").items(), key=lambda item: int(item[1].order)):
    _function, _examples = to_typer_command(_command)
    _epilog = "\n\n".join(["Examples:", *_examples] if _examples else [])
    app.command(_name, cls=Plain, rich_help_panel=PANELS[_command.order // 100], epilog=_epilog)(_function)


def _print_version(is_asked: bool) -> None:  # noqa: FBT001 - as typer calls it
    if is_asked:
        typer.echo(f"attnbench {metadata.version('attnbench')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Accept the options of attnbench itself, which stand before a command."""


USER_ERROR = typer.BadParameter.__mro__[2]  # click's base class of errors for users; typer may have a copy of it
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST_GIVEN = 200  # characters of the command line that an error message repeats
TRACKER = "the issue tracker of attnbench"  # if the package's metadata has no address


def main() -> None:
    """Run the command; exit with its code, with 2 after a user's mistake, or with 128 plus the number of a signal."""
    if line := platforms.first_line():
        typer.echo(line, err=True)
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # nothing may interrupt the cleanup
        received.append(number)
        raise KeyboardInterrupt

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    try:
        code = _code()
    except KeyboardInterrupt:
        code = ExitCode.interrupted
    if received:
        typer.echo(f"stopped by {signal.Signals(received[0]).name}", err=True)
        code = 128 + received[0]
        # Python exits by SIGINT if a string that it executed was interrupted, even if the exception was caught, and
        # dataclasses execute some. Executing another string resets this (CPython's run_eval_code_obj).
        exec("")  # noqa: S102
    sys.exit(code)


def _code() -> int:
    """Run the command; return its exit code, also after an internal error, or if the reader of its output has gone."""
    try:
        code = _ended()
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:  # rich and click turn a closed pipe into exit code 1
        if not any(isinstance(each, BrokenPipeError) for each in (error, error.__context__)):
            raise
        for stream in (sys.stdout, sys.stderr):  # Python flushes both at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001 - a traceback must not exit with 1, which means a finding
        traceback.print_exc()
        links = metadata.metadata("attnbench").get_all("Project-URL") or []
        where = dict(link.split(", ", 1) for link in links).get("Issues", TRACKER)
        what = f"internal error: {type(error).__name__}: {error}; this is a bug in attnbench, not a finding"
        typer.echo(sanitize_line(f"{what}: report it at {where}, with the lines above and attnbench doctor"), err=True)
        return ExitCode.internal
    return code


def _ended() -> int:
    """Run the command and return its exit code; for wrong usage, a damaged session or an OSError, print a message."""
    try:
        return typer.main.get_command(app)(standalone_mode=False, prog_name="attnbench") or ExitCode.passed
    except USER_ERROR as error:  # type: ignore[misc]  # found at run time
        return _wrong_usage(error, sys.argv[1:])
    except typer.Abort:
        return ExitCode.wrong_usage
    except BrokenPipeError:
        raise
    except ValueError as error:
        from attnbench.storage.events import DamagedError  # here, because --help does not need it

        is_damaged = isinstance(error, DamagedError)
        typer.echo(sanitize_line(f"{'invalid session' if is_damaged else 'error'}: {error}"), err=True)
        return ExitCode.invalid if is_damaged else ExitCode.wrong_usage
    except OSError as error:
        what = ": ".join(filter(None, [error.strerror or str(error), error.filename and str(error.filename)]))
        typer.echo(sanitize_line(f"error: {what}; fix this and rerun; finished work is kept"), err=True)
        return ExitCode.wrong_usage


def _wrong_usage(error: Any, words: list[str]) -> ExitCode:  # noqa: ANN401 - click's
    """Print the mistake in the command line, or the replacement of a removed name; return the exit code."""
    names = [*words[:1], *(f"{words[0]} {word.partition('=')[0]}" for word in words[1:])]
    if retired := [name for name in names if name in RETIRED]:
        typer.echo(f"error: attnbench {retired[0]} was removed: {RETIRED[retired[0]]}", err=True)
    elif not words:
        error.show()  # the help
    else:
        command = "".join(f"{word} " for word in words[:1] if word in plugs("attnbench.commands", "COMMAND"))
        given, message = sanitize_line(shlex.join(words), LONGEST_GIVEN), error.format_message().rstrip(".")
        typer.echo(sanitize_line(f"error: {message}; given: {given}; see: attnbench {command}--help"), err=True)
    return ExitCode.wrong_usage
