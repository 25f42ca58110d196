"""Plant every known mistake, run right code, and write the tables: `python -m studies.detection`. Rerun to resume."""

import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import psutil
import typer

from attnbench.units import did_you_mean
from attnbench.workloads.workload import DTYPES
from studies import frame
from studies.detection import honest, power, table
from studies.frame import Piece, Row

SEEDS_AT_ONCE = 50
PACKED: Any = {"method": "gzip", "mtime": 0}


def detect(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the tables go.")] = Path("results/detection"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for the honest implementations.")] = 1000,
    lengths: Annotated[str, typer.Option(help="Lengths at which mistakes are tried.")] = "2,3,17,128,1021,8192",
    only: Annotated[str, typer.Option(metavar="NAME,NAME", help="These mistakes alone.")] = "",
) -> None:
    """Plant every known mistake, run every honest implementation, and count the detections of each rule."""
    try:
        chosen = [int(length) for length in lengths.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{lengths}: give whole numbers with commas between them") from error
    names = tuple(filter(None, only.split(",")))
    if unknown := set(names) - set(power.kinds()):
        wrong = min(unknown)
        raise typer.BadParameter(f"--only {wrong}: there is no such mistake{did_you_mean(wrong, power.kinds())}")
    planted = [
        Piece(name=f"mistakes {length} {dtype}", make=partial(power.rows, length, dtype, names))
        for length in sorted(chosen, reverse=True)  # the longest begin first, since they take most time
        for dtype in DTYPES
    ]
    right = [
        Piece(name=f"honest {first}", make=partial(honest.rows, first, min(first + SEEDS_AT_ONCE, seeds)))
        for first in range(0, seeds, SEEDS_AT_ONCE)
    ]
    with ProcessPoolExecutor(psutil.cpu_count(logical=False), mp_context=get_context("spawn")) as pool:
        frame.complete([*planted, *right], to, pool=pool)
    missed, rejected = write(rows_of(planted, to), rows_of(right, to), to)
    typer.echo(json.dumps({"missed": missed, "honest rejected": rejected, "written to": str(to)}))
    if missed or rejected:
        raise typer.Exit(1)


def rows_of(pieces: list[Piece], to: Path) -> list[Row]:
    """Read the stored rows of all pieces, in the order of the pieces."""
    return [row for piece in pieces for row in frame.rows(to, piece.name)]


def write(planted: list[Row], right: list[Row], to: Path) -> tuple[int, int]:
    """Write the tables; return how often our check missed a mistake, and how often it rejected a right result."""
    order = {name: number for number, name in enumerate(power.kinds())}
    cells = pd.DataFrame([row for row in planted if "is_caught" in row])
    cells = cells.sort_values(["mistake", "length"], key=lambda column: column.map(order).fillna(column), kind="stable")
    absent = pd.DataFrame([row for row in planted if "is_caught" not in row])
    tried = pd.DataFrame(right).sort_values("seed", kind="stable")
    for name, rows in (("mistakes", table.wide(cells)), ("absent", absent), ("honest", tried)):
        rows.to_csv(to / f"{name}.csv.gz", index=False, compression=PACKED)
    words = {name: mistake.words for name, mistake in power.kinds().items()}
    frame.save(to / "detection.md", table.markdown(cells, absent, tried, words))
    missed = cells[(cells["inputs"] == "all") & ~cells["is_caught"]]
    rejected = tried[(tried["inputs"] == "all") & ~tried["is_right"]]
    return len(missed), len(rejected)


if __name__ == "__main__":
    typer.run(detect)
