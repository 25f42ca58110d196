"""The support table: every implementation and question has an answer, each no a reason."""

import re

from attnbench import plugins
from attnbench.commands import OUTPUT
from attnbench.commands import list as listing


def test_every_no_has_its_reason_and_each_implementation_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    entries = listing.implementations(plugins.implementation_names())
    for entry in entries:
        lines = [line.partition(": ") for line in entry["why"].splitlines()]
        assert all(reason for _, _, reason in lines)
        reported = [column for columns, _, _ in lines for column in columns.split(", ")]
        assert sorted(reported) == sorted(column for column in listing.QUESTIONS if entry[column] == "no")
        assert {entry[column] for column in listing.QUESTIONS} <= {"yes", "no"}
    listing.print_support(entries)
    table, _, absent = capsys.readouterr().out.partition("Not here:")
    assert re.search("^sdpa +cap$", table, re.MULTILINE)
    assert all(entry["implementation"] in (table if "yes" in entry.values() else absent) for entry in entries)
    monkeypatch.setattr(OUTPUT, "is_verbose", True)
    listing.print_support(entries)
    printed = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(line.split()) in printed for entry in entries for line in entry["why"].splitlines())
