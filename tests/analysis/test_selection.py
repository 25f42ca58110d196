"""Selecting a part of a run: named parts stay, with the baseline; unknown names are errors."""

import pytest

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import Results
from attnbench.analysis.selection import only
from tests import journals


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return journals.write(tmp_path_factory.mktemp("runs") / "run", journals.workloads(seq_len=(128, 512)))


def test_what_is_named_stays_and_its_baseline(results: Results) -> None:
    kept = only(results, ["fused"], ["seq_len=512"])
    assert {record.implementation for record in kept.records} == {"fused", journals.BASELINE}
    assert {record.workload.seq_len for record in kept.records} == {512}
    assert {each.implementation for each in comparisons(kept)} == {"fused"}
    assert len(only(results).records) == len(results.records)


@pytest.mark.parametrize(
    ("names", "settings", "said"),
    [
        (["fusd"], [], "no implementation fusd .did you mean fused"),
        ([], ["seq_len=256"], "no value of seq_len 256"),
        ([], ["seq=256"], "no axis seq"),
    ],
)
def test_what_the_run_does_not_have_is_an_error(results: Results, names, settings, said) -> None:
    with pytest.raises(ValueError, match=said):
        only(results, names, settings)
