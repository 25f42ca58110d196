"""The work in parts: each runs in its own process and is stored in a folder, so that the study can be resumed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from attnbench.workloads.workload import DTYPES

SEEDS_AT_ONCE = 50
KINDS = {"Cell": "mistakes", "Absent": "absent", "Trial": "honest"}
"""Tables by kind of row."""


def names(lengths: list[int], seeds: int, only: str = "") -> Iterator[str]:
    """List the parts, longest first: all, or those of one generator."""
    kind = only or "mistakes"
    yield from (f"{kind}-{length}-{dtype}" for length in sorted(lengths, reverse=True) for dtype in DTYPES)
    if not only:
        yield from _honest(seeds)


def _honest(seeds: int) -> Iterator[str]:
    yield from (f"honest-{first}-{min(first + SEEDS_AT_ONCE, seeds)}" for first in range(0, seeds, SEEDS_AT_ONCE))


def make(part: str, folder: Path) -> str:
    """Compute one part and store it in the folder, whole or not at all."""
    import torch

    from studies.detection import honest, power

    torch.set_num_threads(1)  # most of it is small: threads that wait for one another take the longest
    kind, first, second = part.split("-")
    found: list[Any] = []
    if kind == "honest":
        found = list(honest.trials(range(int(first), int(second))))
    else:
        found = list(power.cells(int(first), second, "" if kind == "mistakes" else kind))
    rows: dict[str, list[Any]] = {kind: [] for kind in KINDS.values()}
    for each in found:
        rows[KINDS[type(each).__name__]].append(each)
    draft = folder / f"{part}.draft"
    draft.write_bytes(msgspec.json.encode(rows))
    draft.rename(folder / f"{part}.json")
    return part


def assemble(folder: Path, parts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Join all parts in the order of the work, shortest lengths first."""
    made: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS.values()}
    for part in parts:
        for kind, rows in json.loads((folder / f"{part}.json").read_text(encoding="utf-8")).items():
            made[kind].extend(rows)
    return made
