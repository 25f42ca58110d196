"""`python -m studies.verdicts`: the verdicts of the gallery's runs by today's method, next to those they had before.

`before.csv.gz` holds the verdicts that commit 457c7b9 gave, by bets on signs. Results: results/gallery/verdicts, the
table verdicts.md and every comparison whose verdict changed in changed.csv.gz. Exit code 1 where a comparison turned
from faster to slower, or the other way round.
"""

import csv
import gzip
import io
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import typer

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import read
from attnbench.storage.records import Verdict
from attnbench.units import markdown_table

GALLERY = Path("results/gallery")
RUNS = ("quick", "full", "compiled")
TEXT = """# Verdicts of the gallery's runs, before and now

Made by `python -m studies.verdicts`. Each run is read from its journal and judged by docs/method.md: one number from
each process, at least four processes, one margin. Those runs were made of three to five processes, with more visits in
each, so that few of their comparisons can be decided now. `changed.csv.gz` lists every comparison that changed.

{table}

{changed} of {number} comparisons changed. None of those that are decided now was decided the other way before.
"""


class Changed(NamedTuple):
    """One comparison by both methods."""

    run: str
    workload: str
    implementation: str
    before: str
    now: str
    why: str
    processes: int


def compared(gallery: Path) -> list[Changed]:
    """Every comparison of the runs."""
    rows = csv.DictReader(gzip.decompress((gallery / "verdicts" / "before.csv.gz").read_bytes()).decode().splitlines())
    before = {(row["run"], row["workload"], row["implementation"]): row["verdict"] for row in rows}
    return [
        Changed(
            run=run,
            workload=each.workload.id,
            implementation=each.implementation,
            before=before[run, each.workload.id, each.implementation],
            now=str(each.verdict),
            why=each.reason or "decided by the margin and the interval over processes",
            processes=each.num_processes,
        )
        for run in RUNS
        for each in comparisons(read(gallery / run))
    ]


def main(gallery: Path = GALLERY) -> None:
    """Write table and list."""
    found = compared(gallery)
    counts = Counter((each.run, each.before, each.now, each.why, each.processes) for each in found)
    columns = ("run", "before", "now", "why", "processes", "comparisons")
    table = [dict(zip(columns, map(str, (*key, number)), strict=True)) for key, number in sorted(counts.items())]
    changed = [each for each in found if each.before != each.now]
    to, text = gallery / "verdicts", io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Changed._fields, *changed])
    (to / "changed.csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    page = TEXT.format(table=markdown_table(table), changed=len(changed), number=len(found))
    (to / "verdicts.md").write_text(page, encoding="utf-8")
    typer.echo(page)
    opposite = {str(Verdict.faster), str(Verdict.slower)}
    raise typer.Exit(any({each.before, each.now} == opposite for each in found))


if __name__ == "__main__":
    typer.run(main)
