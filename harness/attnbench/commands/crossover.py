"""`attnbench crossover`: from which length on one implementation is faster than another."""

import json
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, ResultsFolder, Resume, TimingOptions

OPTIONS = TimingOptions(sweep="fastest")


def crossover(
    *,
    options: TimingOptions = OPTIONS,
    axis: Annotated[
        str,
        typer.Option(
            metavar="AXIS", help="length (query and key), seq_len, kv_len, num_heads, batch_size or head_dim."
        ),
    ] = "length",
    low: Annotated[int, typer.Option("--from", min=0, metavar="N", help="Where the way begins. 0: by the axis.")] = 0,
    high: Annotated[int, typer.Option("--to", min=0, metavar="N", help="Where the way ends. 0: by the axis.")] = 0,
    results: ResultsFolder = Path("results"),
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Find the length, or another size, at which each two of the named implementations change places.

    It halves the way between two sizes until no more can be decided, and says where, with an interval.
    """
    from attnbench.analysis.recommendation import points
    from attnbench.commands import recommending, running
    from attnbench.processes.execution import new_folder
    from attnbench.processes.planning import plan_to_search
    from attnbench.reports import recommended

    if resume is not None:
        folder, planned = running.to_resume(options.context, resume, results, {"names", "--implementation"})
        if planned.command != "crossover":
            raise ValueError(f"{resume} is no search: go on with {planned.resume_command(resume)}")
        running.require_named(planned, planned.implementations, options.named)
    else:
        baseline = options.named[-1] if options.named else "sdpa"
        planned = plan_to_search(options.selection(baseline=baseline), axis, low, high)
        folder = new_folder(results, "crossover")
    measured = running.execute(planned, folder, kept=running.kept(planned, folder), named=options.named)
    if as_json:
        typer.echo(json.dumps(recommended.crossing_facts(measured), indent=2))
    else:
        recommending.print_crossings(measured)
    if any(record.is_wrong for record in measured.records):
        raise typer.Exit(ExitCode.finding)
    if not any(points(measured, ladder, *both) for ladder, both, _ in recommended.crossings(measured)):
        raise typer.Exit(ExitCode.inconclusive)


COMMAND = Command(
    function=crossover,
    order=16,
    examples=(
        "attnbench crossover fused sdpa --set mask=causal",
        "attnbench crossover fused sdpa --set dtype=float32,bfloat16 --from 32 --to 2048",
        "attnbench crossover mine.py:mine sdpa --axis num_heads --set seq_len=128",
    ),
)
