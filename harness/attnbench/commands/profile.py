"""`attnbench profile`: traces of chosen cells."""

import json
from pathlib import Path

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder, SelectionOptions

OPTIONS = SelectionOptions(sweep="profile")


def profile(
    *, options: SelectionOptions = OPTIONS, results: ResultsFolder = Path("results"), as_json: AsJson = False
) -> None:
    """Trace what each call does, step by step, for attnbench tensorboard and Perfetto. Checked first, never timed."""
    from attnbench.commands import running, terminal
    from attnbench.processes.execution import new_folder
    from attnbench.processes.planning import plan
    from attnbench.storage.records import Status
    from attnbench.tracing import folders

    planned = plan(options.selection(budget_s=0.0, metrics=()), with_baseline=False)
    folder = new_folder(results, planned.sweep, folders.FOLDER)
    kept = f"the traces made so far are in {folder}"
    traced = running.execute(planned, folder, stages=("check", "trace"), kept=kept)
    files = {
        record.key: folders.trace_file(folder, record.workload.id, record.implementation)
        for record in traced.records
        if record.status is Status.ok
    }
    if as_json:
        cells = [
            {
                "workload": record.workload.id,
                "implementation": record.implementation,
                "status": str(record.status),
                "message": record.message,
                "trace": str(files[record.key]) if record.key in files else None,
            }
            for record in traced.records
        ]
        typer.echo(json.dumps(cells, indent=2))
    else:
        terminal.print_traces(traced, files)
        if files:
            typer.echo(f"\nLook at them with: attnbench tensorboard {folder}")
    running.conclude(traced)


COMMAND = Command(function=profile, order=110)
