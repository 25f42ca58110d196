"""The files of a gate: for people, for CI systems, and for programs."""

from pathlib import Path

import msgspec

from attnbench.analysis.gate import junit, markdown, series
from attnbench.analysis.gate.rulings import Decision
from attnbench.analysis.results import Results


def as_json(value: object) -> str:
    """Whatever it is, as JSON that a person can read too."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def write(decision: Decision, candidate: Results, folder: Path) -> list[Path]:
    """Write gate.md, gate.xml, gate.json and benchmarks.json.

    Raises:
        ValueError: the folder cannot be written.
    """
    texts = {
        "gate.md": markdown.document(decision),
        "gate.xml": junit.document(decision),
        "gate.json": as_json(decision),
        "benchmarks.json": as_json(series.entries(candidate)),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another folder with --to") from None
    return [folder / name for name in texts]
