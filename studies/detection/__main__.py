"""`python -m studies.detection`: run all parts, write tables and picture. Rerun it to resume."""

import json
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import psutil
import typer

from attnbench.checking.mistakes import GENERATORS
from studies.detection import parts, power, table

ONLY = "Only the known mistakes of this generator, and no honest results: one more section of the page."
PAGE = "detection.md"
PACKED: Any = {"method": "gzip", "mtime": 0}


def detect(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where tables and picture go.")] = Path("results/detection"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for the honest implementations.")] = 1000,
    lengths: Annotated[str, typer.Option(help="Lengths at which mistakes are tried.")] = "2,3,17,128,1021,8192",
    only: Annotated[str, typer.Option(metavar="GENERATOR", help=ONLY)] = "",
) -> None:
    """Plant every known mistake, run every honest implementation, and count the detections of each rule."""
    try:
        chosen = [int(length) for length in lengths.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{lengths}: give whole numbers with commas between them") from error
    if only and only not in GENERATORS:
        raise typer.BadParameter(f"--only {only}: choose among {', '.join(GENERATORS)}")
    folder = to / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    every = list(parts.names(chosen, seeds, only))
    todo = [part for part in every if not (folder / f"{part}.json").exists()]
    with ProcessPoolExecutor(psutil.cpu_count(logical=False), mp_context=get_context("spawn")) as pool:
        for done, future in enumerate(as_completed(pool.submit(parts.make, part, folder) for part in todo), start=1):
            print(f"{done} of {len(todo)}: {future.result()}", file=sys.stderr, flush=True)  # noqa: T201 - progress
    made = parts.assemble(folder, every)
    missed, rejected = (_write_section(made, to, only), 0) if only else _write(made, to)
    shutil.rmtree(folder)
    typer.echo(json.dumps({"missed": missed, "honest rejected": rejected, "written to": str(to)}))
    if missed or rejected:
        raise typer.Exit(1)


def _write(made: dict[str, list[dict[str, Any]]], to: Path) -> tuple[int, int]:
    """Write tables and picture; return the numbers of missed mistakes and of rejected honest results."""
    from studies.detection import chart

    cells = _in_order(made["mistakes"])
    absent, trials = pd.DataFrame(made["absent"]), pd.DataFrame(made["honest"]).sort_values("seed", kind="stable")
    for name, frame in (("mistakes", table.wide(cells)), ("absent", absent), ("honest", trials)):
        frame.to_csv(to / f"{name}.csv.gz", index=False, compression=PACKED)
    (to / PAGE).write_text(table.markdown(cells, absent, trials, _words()), encoding="utf-8")
    steps = dict(zip(cells["mistake"], cells["step"], strict=True))
    chart.draw(cells, steps).save(to / "detection.png")
    missed = cells[(cells["inputs"] == "all") & ~cells["is_caught"]]
    rejected = trials[(trials["inputs"] == "all") & ~trials["is_right"]]
    return len(missed), len(rejected)


def _write_section(made: dict[str, list[dict[str, Any]]], to: Path, only: str) -> int:
    """Write the page's section and table of some mistakes; return the number of missed ones."""
    cells, absent = _in_order(made["mistakes"]), pd.DataFrame(made["absent"])
    table.wide(cells).to_csv(to / f"{only}.csv.gz", index=False, compression=PACKED)
    page = to / PAGE
    above = page.read_text(encoding="utf-8") if page.exists() else ""
    page.write_text(table.with_section(above, only, cells, absent, _words()), encoding="utf-8")
    return int((~cells[cells["inputs"] == "all"]["is_caught"]).sum())


def _words() -> dict[str, str]:
    """Map each name to the description of its first mistake."""
    return {name: mistake.words for name, mistake in power.kinds().items()}


def _in_order(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Convert the cells to a table, in the order of the steps, short lengths first."""
    order, cells = {name: number for number, name in enumerate(power.kinds())}, pd.DataFrame(rows)
    return cells.sort_values(["mistake", "length"], key=lambda column: column.map(order).fillna(column), kind="stable")


if __name__ == "__main__":
    typer.run(detect)
