"""Text made fit for where it is shown: one line, a cell of a Markdown table, a spreadsheet."""

import html
import re
from collections.abc import Mapping, Sequence

FORMULA_STARTS = ("=", "+", "-", "@")


def plain(text: str, limit: int = 0) -> str:
    """Text from outside on one line without control or direction characters, cut at `limit` characters if given."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if not limit or len(line) <= limit else line[: limit - 3].rstrip() + "..."


def escaped(text: str) -> str:
    """Text from outside as one cell of a Markdown table: no pipe, tag or emphasis takes effect."""
    return re.sub(r"([\\`|*\[\]~$])", r"\\\1", html.escape(text, quote=False))


def guarded(text: str) -> str:
    """One line of text; what a spreadsheet would take for a formula has an apostrophe before it, which makes it text.

    Source: https://owasp.org/www-community/attacks/CSV_Injection.
    """
    line = plain(text)
    return f"'{line}" if line.startswith(FORMULA_STARTS) else line


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows that have the same columns as a Markdown table, every text escaped."""
    import tabulate  # here, because --help needs no table

    columns = list(rows[0]) if rows else []
    texts = [[escaped(row[column]) for column in columns] for row in rows]
    headings = [escaped(column) for column in columns]
    return str(tabulate.tabulate(texts, headings, "github", disable_numparse=True))


def markdown_list(facts: Mapping[str, str]) -> str:
    """Facts under their names as a Markdown list, every text escaped."""
    return "\n".join(f"- **{name}**: {escaped(text)}" for name, text in facts.items())
