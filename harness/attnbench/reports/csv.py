"""Every cell as one row of records.csv, safe to open in a spreadsheet."""

from pathlib import Path

from attnbench.analysis.results import Results
from attnbench.analysis.table import table
from attnbench.reports import Report
from attnbench.units import guarded


def write(results: Results, folder: Path) -> list[Path]:
    """Write records.csv: the table of `attnbench.load`, with NA where a value is missing."""
    cells = table(results).copy()
    for column in cells.columns:
        if cells[column].dtype.kind not in "iufb":
            cells[column] = cells[column].map(guarded, na_action="ignore")
    path = folder / "records.csv"
    cells.to_csv(path, index=False, na_rep="NA", lineterminator="\n")
    return [path]


REPORT = Report(summary="every cell as a row of a table, for spreadsheets and pandas", write=write)
