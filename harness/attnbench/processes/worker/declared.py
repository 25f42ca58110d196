"""Load the implementations of a file in a process, and write what each has built in: `python -m ... FILE SPEC...`."""

import json
import sys
from pathlib import Path

from attnbench.contract.loading import implementation
from attnbench.processes.worker.attempts import load_error


def main(file: Path, specs: list[str]) -> None:
    """Write {spec: {"built_in": {axis: value}, "problem": why it cannot be loaded, or ""}} as JSON."""
    file.write_text(json.dumps({spec: declaration(spec) for spec in specs}), encoding="utf-8")


def declaration(spec: str) -> dict[str, object]:
    """What one spec has built in, or why it cannot be loaded."""
    try:
        return {"built_in": dict(implementation(spec).built_in()), "problem": ""}
    except Exception as error:  # noqa: BLE001 - whatever importing somebody's module raises
        return {"built_in": {}, "problem": str(load_error(spec, error))}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
