"""The support table: every implementation and question has an answer, each no a reason."""

import re

from attnbench import plugins
from attnbench.commands import OUTPUT
from attnbench.commands import list as listing


def test_every_no_has_its_reason_and_each_implementation_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    entries = listing.implementations(plugins.implementation_names())
    assert {entry["implementation"] for entry in entries} >= set(plugins.stems(plugins.PACKAGE))
    for entry in entries:
        answers = {entry[column] for column in listing.QUESTIONS}
        assert answers <= {"yes", "no"}
        assert bool(entry["why"]) is ("no" in answers)
    listing.print_support(entries)
    table, _, absent = capsys.readouterr().out.partition("Not here:")
    assert re.search("^sdpa +cap$", table, re.MULTILINE)
    assert all(entry["implementation"] in (table if "yes" in entry.values() else absent) for entry in entries)
    monkeypatch.setattr(OUTPUT, "is_verbose", True)
    listing.print_support(entries)
    printed = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(entry["why"].split()) in printed for entry in entries)
