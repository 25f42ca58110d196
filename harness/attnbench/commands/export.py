"""`attnbench export`: a stored run in the format of another tool."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, ResultsFolder

if TYPE_CHECKING:
    from attnbench.analysis.results import Results

Format = Literal["csv", "pytest-benchmark", "customSmallerIsBetter", "oss-ci-v3"]
MODES = {"inference": "inference", "forward": "inference", "backward": "training", "forward_backward": "training"}
"""What PyTorch's benchmark database calls a direction."""


def export(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Names or folders. Default: newest.")
    ] = None,
    *,
    kind: Annotated[
        Format,
        typer.Option(
            "--format",
            help="csv: every cell as a row. pytest-benchmark: for `pytest-benchmark compare`. customSmallerIsBetter: "
            "for github-action-benchmark. oss-ci-v3: for PyTorch's benchmark database.",
        ),
    ] = "csv",
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="Write there. Default: print it.")] = None,
    results: ResultsFolder = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Write a stored run in the format of another tool. Needs no torch."""
    from attnbench.analysis.results import read
    from attnbench.storage.files import put, writing_to
    from attnbench.storage.journal import find_run, newest_run

    folders = [find_run(name, results) for name in runs or ()] or [newest_run(results)]
    if len(folders) > 1 and kind == "pytest-benchmark":
        raise ValueError("--format pytest-benchmark holds one run: name a single RUN")
    text = WRITERS[kind]([read(folder) for folder in folders])
    if to is not None:
        with writing_to(to.parent):
            put(to, text)
    written = {"format": kind, "num_bytes": len(text.encode()), "file": None if to is None else str(to)}
    if as_json:
        typer.echo(json.dumps(written | ({"text": text} if to is None else {}), indent=2))
    elif to is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{to} has {written['num_bytes']:,} bytes", err=True)
    raise typer.Exit(ExitCode.passed)


def records(stored: "Results") -> list[dict[str, Any]]:
    """One record for each metric of each cell, as PyTorch's benchmark database takes them; times in seconds.

    Source: https://github.com/pytorch/pytorch/wiki/How-to-integrate-with-PyTorch-OSS-benchmark-database
    """
    from attnbench.units import plain

    found = next(iter(stored.environments.values()), None)
    machine = {} if found is None else {"cpu_info": found.cpu, "gpu_info": found.accelerator, "os": found.system}
    versions = {} if found is None else dict(found.versions)
    return [
        {
            "benchmark": {
                "name": "attnbench",
                "mode": MODES[record.workload.direction],
                "dtype": record.workload.dtype,
                "extra_info": {"run": stored.run, "commit": record.commit or "", "workload": record.workload.id},
            },
            "model": {
                "name": plain(str(record.arm)),
                "type": "attention",
                "backend": record.operators.observed if record.operators is not None else "",
            },
            "inputs": {axis: {"extra_info": {"value": value}} for axis, value in record.workload.axes().items()},
            "metric": {
                "name": measurement.metric,
                "benchmark_values": [sample.value for sample in measurement.samples],
                "extra_info": {"unit": measurement.unit},
            },
            "runners": [machine | {"extra_info": {"fingerprint": "" if found is None else found.fingerprint}}],
            "dependencies": {name: {"version": version} for name, version in versions.items()},
        }
        for record in stored.records
        for measurement in record.measurements
        if measurement.samples
    ]


def _csv(found: "list[Results]") -> str:
    import pandas as pd

    from attnbench.analysis.table import table
    from attnbench.reports.csv import spreadsheet

    return spreadsheet(pd.concat([table(stored) for stored in found], ignore_index=True), missing="NA")


def _pytest_benchmark(found: "list[Results]") -> str:
    from attnbench.analysis.gate.outputs import as_json
    from attnbench.reports.pytest_benchmark import document

    return as_json(document(found[0]))


def _series(found: "list[Results]") -> str:
    from attnbench.analysis.gate.outputs import as_json, series

    return as_json([each for stored in found for each in series(stored)])


def _records(found: "list[Results]") -> str:
    from attnbench.analysis.gate.outputs import as_json

    return as_json([each for stored in found for each in records(stored)])


WRITERS: "dict[Format, Callable[[list[Results]], str]]" = {
    "csv": _csv,
    "pytest-benchmark": _pytest_benchmark,
    "customSmallerIsBetter": _series,
    "oss-ci-v3": _records,
}
COMMAND = Command(
    function=export,
    order=57,
    examples=(
        "attnbench export --to cells.csv",
        "attnbench export RUN --format pytest-benchmark --to 0001_run.json",
        "attnbench export --format oss-ci-v3",
    ),
)
