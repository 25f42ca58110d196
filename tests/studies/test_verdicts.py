"""Old verdicts next to today's: each change has a reason."""

import pytest

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import read
from studies import verdicts
from tests import journals


@pytest.mark.parametrize(("num_epochs", "now", "reason"), [(2, "undecided", "fewer than 4"), (16, "slower", "")])
def test_a_verdict_of_too_few_processes_is_listed_with_its_reason(tmp_path, num_epochs, now, reason):
    journals.write(tmp_path / "run", journals.workloads(seq_len=(512,)), ("sdpa", "fused"), num_epochs=num_epochs)
    results = read(tmp_path / "run")
    (one,) = comparisons(results)
    stored = {(one.workload.id, "fused"): "slower", (one.workload.id, "gone"): "faster"}
    row, gone = verdicts.rows(verdicts.Archived(sweep="quick", commit="0", results=results, stored=stored))
    assert (row["then"], row["now"]) == ("slower", str(one.verdict)) == ("slower", now)
    assert row["why"].startswith(reason)
    assert gone["now"] == verdicts.GONE
