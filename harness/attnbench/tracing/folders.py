"""Folders of traces: results/traces/RUN/WORKLOAD/IMPLEMENTATION/IMPLEMENTATION.pt.trace.json.gz, one for each cell.

TensorBoard treats a folder as a run, and the text before `.pt.trace.json` as the name of a worker. The profiler's own
handler would use the host's name there; these files use the implementation's name.
"""

import gzip
import json
from pathlib import Path
from typing import Any

from attnbench.storage.files import write_atomically
from attnbench.units import did_you_mean

SUFFIX = ".pt.trace.json.gz"
FOLDER = "traces"


def trace_file(run: Path, workload_id: str, name: str) -> Path:
    """Return the path of the trace of one cell."""
    return run / workload_id / name / f"{name}{SUFFIX}"


def write(file: Path, trace: dict[str, Any]) -> None:
    """Write a trace atomically.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=6, mtime=0))


def trace_files(folder: Path) -> list[Path]:
    """List all traces below a folder, sorted; include uncompressed ones, which other programs may have written."""
    return sorted(file for pattern in ("*.pt.trace.json", "*.pt.trace.json.gz") for file in folder.rglob(pattern))


def find(name: str | None, results: Path) -> Path:
    """Find a folder of traces by its name below `results` or by its path; without a name, find the newest folder.

    Raises:
        ValueError: there is no such folder, or it contains no trace; the message says what to do.
    """
    known = {folder.name: folder for folder in sorted((results / FOLDER).glob("*")) if trace_files(folder)}
    if name is None and known:
        return known[max(known)]
    folder = results / FOLDER if name is None else known.get(name, Path(name))
    if name is None or not trace_files(folder):
        hint = did_you_mean(name or "", known)
        raise ValueError(f"{folder} holds no traces (*.pt.trace.json.gz){hint}: make some with attnbench profile")
    return folder
