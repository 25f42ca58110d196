"""The command line: every command of commands, and what becomes of a user's mistake."""

import sys

import typer

from attnbench.commands.baseline import baseline
from attnbench.commands.check import check
from attnbench.commands.compare import compare
from attnbench.commands.doctor import doctor
from attnbench.commands.ending import WRONG_USAGE
from attnbench.commands.gate import gate
from attnbench.commands.growth import growth
from attnbench.commands.history import history
from attnbench.commands.inspect import inspect
from attnbench.commands.listing import list_what
from attnbench.commands.profile import profile
from attnbench.commands.report import report
from attnbench.commands.run import run_sweep
from attnbench.commands.tensorboard import tensorboard

app = typer.Typer(
    name="attnbench",
    help="Which attention implementation is right, which is fast, which fits in memory: on your shapes and machine.",
    epilog="Exit codes: 0 pass, 1 a finding (disagreement, failed cell, regression), 2 wrong usage, 3 inconclusive: "
    "too little could be checked or judged, 4 an invalid session, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("list")(list_what)
app.command("run")(run_sweep)
app.command()(check)
app.command()(inspect)
app.command()(report)
app.command()(growth)
app.command()(history)
app.command()(compare)
app.command()(gate)
app.command()(baseline)
app.command()(profile)
app.command()(tensorboard)
app.command()(doctor)


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
