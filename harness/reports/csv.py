"""Every cell as one row of records.csv, safe to open in a spreadsheet."""

from pathlib import Path

from harness.frame import frame
from harness.reports import Report
from harness.store import Results

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def guarded(text: str) -> str:
    """Text that a spreadsheet would take for a formula, with an apostrophe before it that makes it text again.

    Source: https://owasp.org/www-community/attacks/CSV_Injection.
    """
    return f"'{text}" if text.lstrip(" ").startswith(FORMULA_STARTS) else text


def write(results: Results, folder: Path) -> list[Path]:
    """Write records.csv: the table of `harness.frame.load`, with NA where a value is missing."""
    table = frame([results])
    for column in table.columns:
        if table[column].dtype.kind not in "iufb":
            table[column] = table[column].map(guarded, na_action="ignore")
    path = folder / "records.csv"
    table.to_csv(path, index=False, na_rep="NA", lineterminator="\n")
    return [path]


REPORT = Report(summary="every cell as a row of a table, for spreadsheets and pandas", write=write)
