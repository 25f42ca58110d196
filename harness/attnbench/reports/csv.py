"""The report records.csv: every cell of a run as a row, safe to open in a spreadsheet."""

from attnbench.analysis.results import Results
from attnbench.analysis.table import table
from attnbench.reports import Report
from attnbench.units import guarded


def text(results: Results) -> str:
    """Return the table of `attnbench.table` as CSV. Missing values are NA, and formulas are escaped (`guarded`)."""
    safe = table(results).copy()
    for column in safe.columns:
        if safe[column].dtype.kind not in "iufb":
            safe[column] = safe[column].map(guarded, na_action="ignore")
    return str(safe.to_csv(index=False, na_rep="NA", lineterminator="\n"))


REPORT = Report(
    summary="every cell as a row of a table, for spreadsheets and pandas", file="records.csv", text=text, is_usual=True
)
