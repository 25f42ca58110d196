"""Load an implementation in a process of its own, and write what it has built in: `python -m ... SPEC FILE`."""

import json
import sys
from pathlib import Path

from attnbench.contract.loading import implementation
from attnbench.processes.worker.attempts import LoadError


def main(spec: str, file: Path) -> None:
    """Write {"built_in": {axis: value}, "problem": why it cannot be loaded, or ""} as JSON."""
    try:
        answer: dict[str, object] = {"built_in": dict(implementation(spec).built_in()), "problem": ""}
    except Exception as error:  # noqa: BLE001 - whatever importing somebody's module raises
        answer = {"built_in": {}, "problem": str(LoadError(spec, error))}
    file.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
