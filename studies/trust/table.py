"""Tables of cheats and contaminations, as Markdown and CSV."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pandas as pd

from attnbench.units import markdown_table, plain
from studies import frame
from studies.trust.outcome import Row

OUTCOMES = ("no time", "true time", "TIME GIVEN WRONGLY", "RUN LOST")
TEMPLATE = """# Can times be trusted whoever wrote the code?

Made by `nox -s cheats`: each case is run for real by `attnbench run`, together with `sdpa`, `fused` and `chunked`.
"Affected" counts cases in which another implementation lost its status, or its time or ratio left the
range of clean runs; that of the group "control", in which nobody cheats, is noise. A machine at rest has little of it.

{summary}

## Cheats

{cheats}
## Contaminations

{contaminations}
"""


def write(rows: Sequence[Row], to: Path, stem: str = "trust") -> None:
    """Write STEM.csv and STEM.md."""
    cells = pd.DataFrame([msgspec.structs.asdict(row) | {"is_good": row.is_good} for row in rows])
    frame.save(to / f"{stem}.csv", cells.to_csv(index=False, float_format="%.4g"))
    frame.save(to / f"{stem}.md", markdown(rows))


def markdown(rows: Sequence[Row]) -> str:
    """Format the whole report."""
    cheats = [row for row in rows if row.is_cheat]
    spoilers = [row for row in rows if row.is_contamination]
    return TEMPLATE.format(summary=_summary(rows), cheats=_cheats(cheats), contaminations=_contaminations(spoilers))


def _summary(rows: Sequence[Row]) -> str:
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        counts = Counter(row.outcome for row in own)
        lines.append(
            {"group": group, "cases": str(len(own))}
            | {outcome: str(counts[outcome]) for outcome in OUTCOMES}
            | {
                "reason names the effect": str(sum(row.outcome == "no time" and row.names_effect for row in own)),
                "affected": str(sum(bool(row.changed_bystanders) for row in own)),
            }
        )
    return markdown_table(lines)


def _cheats(rows: Sequence[Row]) -> str:
    return markdown_table(
        [
            {
                "case": row.id,
                "what it does": row.does,
                "outcome": row.outcome,
                "reason": _short(row),
                "others": row.changed_bystanders,
            }
            for row in rows
        ]
    )


def _contaminations(rows: Sequence[Row]) -> str:
    return markdown_table(
        [
            {
                "case": row.id,
                "outcome": row.outcome,
                "reason": _short(row),
                "who else changed": row.changed_bystanders or "nobody",
                "worst innocent, ratio / clean ratio": (
                    "-" if row.worst_bystander is None else f"{row.worst_bystander:.2f}"
                ),
            }
            for row in rows
        ]
    )


def _short(row: Row) -> str:
    words = plain(f"{row.status}: {row.reason}" if row.outcome == "no time" else row.reason)
    return textwrap.shorten(words, 110, placeholder=" ...")
