"""Every cell as one row of records.csv, safe to open in a spreadsheet."""

from attnbench.analysis.results import Results
from attnbench.analysis.table import table
from attnbench.reports import text_report
from attnbench.units import guarded


def text(results: Results) -> str:
    """The table of `attnbench.load`, with NA where a value is missing."""
    cells = table(results).copy()
    for column in cells.columns:
        if cells[column].dtype.kind not in "iufb":
            cells[column] = cells[column].map(guarded, na_action="ignore")
    return str(cells.to_csv(index=False, na_rep="NA", lineterminator="\n"))


REPORT = text_report("records.csv", "every cell as a row of a table, for spreadsheets and pandas", text)
