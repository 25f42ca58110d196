"""Every cell as one row of records.csv, safe to open in a spreadsheet."""

from pathlib import Path

from attnbench.analysis.frame import frame
from attnbench.analysis.results import Results
from attnbench.reports import Report, words

FORMULA_STARTS = ("=", "+", "-", "@")


def guarded(text: str) -> str:
    """One line of text; what a spreadsheet would take for a formula has an apostrophe before it, which makes it text.

    Source: https://owasp.org/www-community/attacks/CSV_Injection.
    """
    line = words.plain(text)
    return f"'{line}" if line.startswith(FORMULA_STARTS) else line


def write(results: Results, folder: Path) -> list[Path]:
    """Write records.csv: the table of `attnbench.analysis.frame.load`, with NA where a value is missing."""
    table = frame([results])
    for column in table.columns:
        if table[column].dtype.kind not in "iufb":
            table[column] = table[column].map(guarded, na_action="ignore")
    path = folder / "records.csv"
    table.to_csv(path, index=False, na_rep="NA", lineterminator="\n")
    return [path]


REPORT = Report(summary="every cell as a row of a table, for spreadsheets and pandas", write=write)
