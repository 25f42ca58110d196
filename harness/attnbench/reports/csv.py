"""All cells as rows of records.csv, safe to open in a spreadsheet."""

import pandas as pd

from attnbench.analysis.results import Results
from attnbench.analysis.table import table
from attnbench.reports import text_report
from attnbench.units import guarded


def text(results: Results) -> str:
    """The table of `attnbench.table` as CSV, with NA for missing values."""
    return spreadsheet(table(results), missing="NA")


def spreadsheet(cells: pd.DataFrame, missing: str) -> str:
    """A table as CSV, with texts protected from being read as formulas, and `missing` for missing values."""
    safe = cells.copy()
    for column in cells.columns:
        if cells[column].dtype.kind not in "iufb":
            safe[column] = cells[column].map(guarded, na_action="ignore")
    return str(safe.to_csv(index=False, na_rep=missing, lineterminator="\n"))


REPORT = text_report("records.csv", "every cell as a row of a table, for spreadsheets and pandas", text)
