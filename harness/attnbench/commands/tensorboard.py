"""`attnbench tensorboard`: a viewer for traces."""

import json
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, OpenPage, ResultsFolder, require_extra


def tensorboard(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN|DIR]", help="Which traces, by name or folder. Default: newest.")
    ] = None,
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="0: any that is free.")] = 6006,
    results: ResultsFolder = Path("results"),
    open_page: OpenPage = False,
    as_json: AsJson = False,
) -> None:
    """Show traces in TensorBoard, on this machine alone, and without the internet. Ctrl-C ends it."""
    require_extra("torch_tb_profiler", "tensorboard")
    from attnbench.tracing import folders
    from attnbench.tracing.viewer import server

    folder = folders.find(run, results)
    stopped = server.stopping()
    address, damaged = server.launch(folder, port)
    for line in damaged:
        typer.echo(f"warning: {line}", err=True)
    shown = {"folder": str(folder), "address": address}
    typer.echo(json.dumps(shown) if as_json else f"{folder}: {address} (Ctrl-C ends it)")
    if open_page:
        typer.launch(address)
    server.wait(stopped)
    typer.echo("ended", err=True)


COMMAND = Command(
    function=tensorboard,
    order=120,
    examples=(
        "attnbench tensorboard",
        "attnbench tensorboard RUN --port 0 --open",
    ),
)
