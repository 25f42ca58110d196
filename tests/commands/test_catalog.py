"""The support table: every implementation and question has an answer, each no a reason, and it fits the terminal."""

import re

import pytest

from attnbench import plugins
from attnbench.commands import OUTPUT
from attnbench.commands import list as listing

NAMES = plugins.implementation_names()


@pytest.fixture(scope="module")
def entries():
    return listing.implementations(NAMES)


def test_every_no_has_its_reason_and_every_yes_has_none(entries):
    assert [entry["implementation"] for entry in entries] == list(NAMES)
    for entry in entries:
        reported = [column for line in entry["why"].splitlines() for column in line.partition(": ")[0].split(", ")]
        assert sorted(reported) == sorted(column for column in listing.QUESTIONS if entry[column] == "no")
        assert all(line.partition(": ")[2] for line in entry["why"].splitlines())
        assert {entry[column] for column in listing.QUESTIONS} <= {"yes", "no"}


def test_each_implementation_is_printed_with_what_it_lacks_or_why_it_is_not_here(entries, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listing.print_support(entries)
    table, _, absent = capsys.readouterr().out.partition("Not here:")
    assert re.search("^sdpa +cap$", table, re.MULTILINE)
    assert all(entry["implementation"] in (table if "yes" in entry.values() else absent) for entry in entries)
    monkeypatch.setattr(OUTPUT, "is_verbose", True)
    listing.print_support(entries)
    printed = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(line.split()) in printed for entry in entries for line in entry["why"].splitlines())
