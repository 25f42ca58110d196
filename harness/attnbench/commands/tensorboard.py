"""`attnbench tensorboard`: show traces in TensorBoard."""

import json
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import OUTPUT, Command
from attnbench.commands.options import require_extra
from attnbench.tracing import folders

Port = Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="0: any that is free.")]


def tensorboard(
    run: str | None = None, *, port: Port = 6006, results: Path = Path("results"), open_page: bool = False
) -> None:
    """Show traces in TensorBoard, on this machine alone, and without the internet. Ctrl-C ends it.

    Options:
        run ([RUN|DIR]): Name or folder of the traces. Default: newest.
    """
    require_extra("torch_tb_profiler", "tensorboard")
    from attnbench.tracing.viewer import server

    folder = folders.find(run, results)
    stopped = server.stopping()
    address = server.launch(folder, port)
    facts = json.dumps({"folder": str(folder), "address": address})  # one line, since the command goes on
    typer.echo(facts if OUTPUT.is_json else f"{folder}: {address} (Ctrl-C ends it)")
    if open_page:
        typer.launch(address)
    server.wait(stopped)
    typer.echo("ended", err=True)


COMMAND = Command(tensorboard, order=230)
