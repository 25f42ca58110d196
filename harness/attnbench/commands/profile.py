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
    """Say where the time of a call goes, and trace each of its steps for attnbench tensorboard and Perfetto.

    Cells are checked first, and never timed: a profiler slows calls down, some more than others.
    """
    from attnbench.analysis.breakdown import where
    from attnbench.commands import running, terminal
    from attnbench.processes.execution import new_folder
    from attnbench.reports import endings, grouped
    from attnbench.storage.records import Status
    from attnbench.tracing import folders
    from attnbench.units import MISSING, plain, show

    planned = options.plan(budget_s=0.0, metrics=(), with_baseline=False)
    folder = new_folder(results, planned.sweep, folders.FOLDER)
    kept = f"the traces made so far are in {folder}"
    traced = running.execute(planned, folder, stages=("check", "operators", "trace"), kept=kept)
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
                "spends": None if record.operators is None else where(record.operators),
            }
            for record in traced.records
        ]
        typer.echo(json.dumps(cells, indent=2))
    else:
        for workload, records in grouped(traced.records, lambda record: record.workload.id).items():
            terminal.say(workload, "bold")
            sizes = [show(files[one.key].stat().st_size, "bytes") if one.key in files else MISSING for one in records]
            rows = [(plain(one.implementation), one.status, size) for one, size in zip(records, sizes, strict=True)]
            terminal.print_table(("implementation", "status", "trace"), rows)
            for one in records:
                if one.operators is not None and (shares := where(one.operators)):
                    terminal.say(f"{one.implementation} spends {shares}")
        terminal.print_findings(traced)
        if files:
            typer.echo(f"\nLook at them with: attnbench tensorboard {folder}")
    running.finish(endings.of_run(traced), is_silent=as_json)


COMMAND = Command(
    function=profile,
    order=110,
    examples=(
        "attnbench profile fused sdpa",
        "attnbench profile mine.py --set seq_len=512 --set mask=causal",
    ),
)
