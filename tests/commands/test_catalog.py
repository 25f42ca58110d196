"""The support table: every implementation and question has an answer, each no a reason, and it fits the terminal."""

import re

import pytest

from attnbench import plugins
from attnbench.checking.case import reason_against
from attnbench.commands import VERBOSITY, catalog
from attnbench.commands import list as listing
from attnbench.contract import Implementation

NAMES = plugins.implementation_names()


@pytest.fixture(scope="module")
def entries():
    return catalog.implementations(NAMES)


def test_every_no_has_its_reason_and_every_yes_has_none(entries):
    assert [entry["implementation"] for entry in entries] == list(NAMES)
    for entry in entries:
        reported = [column for line in entry["why"].splitlines() for column in line.partition(": ")[0].split(", ")]
        assert sorted(reported) == sorted(column for column in catalog.QUESTIONS if entry[column] == "no")
        assert all(line.partition(": ")[2] for line in entry["why"].splitlines())
        assert {entry[column] for column in catalog.QUESTIONS} <= {"yes", "no"}


def test_each_implementation_is_printed_with_what_it_lacks_or_why_it_is_not_here(entries, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listing.print_support(entries)
    table, _, absent = capsys.readouterr().out.partition("Not here:")
    assert re.search("^sdpa +cap$", table, re.MULTILINE)
    assert all(entry["implementation"] in (table if "yes" in entry.values() else absent) for entry in entries)
    monkeypatch.setattr(VERBOSITY, "is_verbose", True)
    listing.print_support(entries)
    printed = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(line.split()) in printed for entry in entries for line in entry["why"].splitlines())


def test_an_adapted_module_takes_part_under_dropout_where_it_is_reported_how():
    import torch

    from attnbench.checking.dropout import examine
    from attnbench.contract.adapters import adapt, packed
    from attnbench.workloads.workload import Workload

    def set_dropout(module, share):
        module.dropout = share
        module.train(share > 0)

    def given(**how):
        return adapt(
            lambda sizes: torch.nn.MultiheadAttention(sizes.embed_dim, sizes.num_heads, batch_first=True),
            packed("in_proj_{}", out="out_proj"),
            call=lambda module, x, context, mask: module(x, context, context, need_weights=False),
            masks=("none",),
            **how,
        )

    point = Workload(seq_len=8, num_heads=2, head_dim=8, dropout=0.3, scope="module")
    assert "no attention dropout" in str(reason_against(given(), point))
    assert reason_against(given(dropout=set_dropout), point) is None
    assert [each.found for each in examine(given(dropout=set_dropout), point, 0) if each.found] == []
    inert = given(dropout=lambda module, share: None)
    assert "nothing is dropped" in examine(inert, point, 0)[-1].found


def test_a_function_takes_part_under_dropout_by_its_parameter(tmp_path):
    from attnbench.checking.dropout import examine
    from attnbench.contract.loading import implementation
    from attnbench.workloads.workload import Workload

    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def f(query, key, value, *, mask=None, dropout=0.0):\n"
        "    weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)\n"
        "    return torch.dropout(weights, dropout, train=True) @ value\n"
        "def g(query, key, value):\n"
        "    return f(query, key, value)\n"
    )
    point = Workload(seq_len=8, num_heads=2, head_dim=8, dropout=0.3)
    found = implementation(f"{tmp_path / 'mine.py'}:f")
    assert isinstance(found, Implementation)
    assert reason_against(found, point) is None
    assert all(each.holds for each in examine(found, point, 0))
    assert "no parameter dropout" in str(reason_against(implementation(f"{tmp_path / 'mine.py'}:g"), point))
