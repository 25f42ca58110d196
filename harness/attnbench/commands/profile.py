"""`attnbench profile`: show where the time of a call goes, and record traces."""

from pathlib import Path

import typer

from attnbench.analysis.breakdown import operator_shares
from attnbench.analysis.conclusion import Conclusion
from attnbench.commands import Command, running, terminal
from attnbench.commands.frame import present
from attnbench.commands.options import SelectionOptions
from attnbench.console import say
from attnbench.processes.execution import new_folder
from attnbench.reports import exit_status
from attnbench.storage.records import Status
from attnbench.tracing import folders
from attnbench.units import grouped

OPTIONS = SelectionOptions(sweep="profile")


def profile(*, options: SelectionOptions = OPTIONS, results: Path = Path("results")) -> Conclusion:
    """Show where the time of a call goes, and record traces for attnbench tensorboard and Perfetto.

    Cells are checked first, and never timed: a profiler slows calls down, some more than others.
    """
    planned = options.plan(budget_s=0.0, metrics=(), with_baseline=False)
    folder = new_folder(results, planned.sweep, folders.FOLDER)
    hint = f"the traces made so far are in {folder}"
    traced = running.execute(planned, folder, stages=("check", "operators", "trace"), hint=hint)
    cells = []
    for record in traced.records:
        cell = {"workload": record.workload.id, "implementation": record.implementation, "status": str(record.status)}
        file = folders.trace_file(folder, record.workload.id, record.implementation)
        spends = None if record.operators is None else operator_shares(record.operators)
        trace = str(file) if record.status is Status.ok else None
        cells.append({**cell, "message": record.message, "trace": trace, "spends": spends})

    def show() -> None:
        for workload, members in grouped(cells, lambda cell: cell["workload"]).items():
            say(str(workload), "bold")
            for cell in members:
                say(f"{cell['implementation']}: {cell['trace'] or cell['status']}")
                if cell["spends"]:
                    say(f"Time of {cell['implementation']}: {cell['spends']}")
        terminal.print_findings(traced)
        if any(cell["trace"] for cell in cells):
            typer.echo(f"\nView them: attnbench tensorboard {folder}\nor open one at https://ui.perfetto.dev")

    present(lambda: cells, show)
    return exit_status.of_run(traced)


COMMAND = Command(profile, order=220)
