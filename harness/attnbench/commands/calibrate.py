"""`attnbench calibrate`: a minute of small cells, from which times and memory of others are predicted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder, SelectionOptions

OPTIONS = SelectionOptions(sweep="quick", call_limit_s=0.1)
SETTINGS = ["mask=none,causal"]
"""Where nothing is set."""


def calibrate(
    *,
    options: SelectionOptions = OPTIONS,
    budget_s: Annotated[
        float, typer.Option("--budget", min=1.0, metavar="SECONDS", help="Wall time, which is always spent.")
    ] = 57.0,
    results: ResultsFolder = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Time a spread of small cells for a minute, so that `run --dry-run` can predict others, with intervals.

    Sizes that are not set are spread; of other axes, what is set is calibrated.
    """
    from attnbench.analysis import calibration
    from attnbench.commands import running
    from attnbench.processes.execution import new_folder
    from attnbench.processes.planning import plan
    from attnbench.workloads.sweep import parse_settings

    chosen = options if options.settings else replace(options, settings=SETTINGS)
    base = plan(chosen.selection(), with_baseline=False)
    planned = calibration.planned(base, parse_settings(chosen.settings or []), budget_s)
    folder = new_folder(results, "cells", calibration.FOLDER)
    measured = running.execute(planned, folder, kept=f"what was finished counts already: {folder}")
    found = calibration.load([folder])
    facts = calibration.facts(found)
    kept = {"folder": str(folder), "elapsed_s": measured.elapsed_s}
    typer.echo(json.dumps(facts | kept, indent=2) if as_json else f"{calibration.sentence(facts)}\nKept in: {folder}")
    running.conclude_check(measured, is_complete=True)


COMMAND = Command(
    function=calibrate,
    order=25,
    examples=(
        "attnbench calibrate sdpa fused",
        "attnbench calibrate sdpa fused --set direction=inference,forward_backward --set dtype=bfloat16",
    ),
)
