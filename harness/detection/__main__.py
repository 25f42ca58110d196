"""`python -m harness.detection`: try everything, write tables and picture."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer


def detect(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where tables and picture go.")] = Path("results/detection"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for the honest implementations.")] = 1000,
    lengths: Annotated[str, typer.Option(help="Lengths at which mistakes are tried.")] = "2,3,17,128,1021,8192",
) -> None:
    """Plant every known mistake, run every honest implementation, and count who is caught by which rule."""
    import torch

    from harness.detection import chart, honest, power, table
    from harness.mistakes import ALL
    from harness.reports.style import save

    torch.set_num_threads(1)  # most of it is small: threads that wait for one another take the longest
    try:
        chosen = [int(length) for length in lengths.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{lengths}: give whole numbers with commas between them") from error
    to.mkdir(parents=True, exist_ok=True)
    found = list(power.cells(chosen, on_step=_tell))
    cells = _frame(each for each in found if isinstance(each, power.Cell))
    absent = _frame(each for each in found if isinstance(each, power.Absent))
    trials = _frame(honest.trials(range(seeds), on_step=_tell))
    cells.to_csv(to / "mistakes.csv", index=False)
    absent.to_csv(to / "absent.csv", index=False)
    trials.to_csv(to / "honest.csv", index=False)
    words = {mistake.name: mistake.words.replace("{choice}", "...") for mistake in ALL}
    (to / "detection.md").write_text(table.markdown(cells, absent, trials, words), encoding="utf-8")
    steps = dict(zip(cells["mistake"], cells["step"], strict=True))
    save([chart.draw(cells, steps)], to, "detection")
    missed = cells[(cells["inputs"] == "all") & ~cells["is_caught"]]
    rejected = trials[(trials["inputs"] == "all") & ~trials["is_right"]]
    typer.echo(json.dumps({"missed": len(missed), "honest rejected": len(rejected), "written to": str(to)}))
    if len(missed) or len(rejected):
        raise typer.Exit(1)


def _frame(rows: Iterable[msgspec.Struct]) -> Any:  # noqa: ANN401 - a DataFrame, which is imported late
    import pandas as pd

    return pd.DataFrame([msgspec.structs.asdict(row) for row in rows])


def _tell(step: str) -> None:
    print(step, file=sys.stderr, flush=True)  # noqa: T201 - progress, on standard error


if __name__ == "__main__":
    typer.run(detect)
