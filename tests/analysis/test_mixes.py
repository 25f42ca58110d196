"""The time of a whole model: each layer counted by its frequency, with missing parts named."""

import pytest

from attnbench.analysis.mixes import totals
from attnbench.workloads.models import Mix
from attnbench.workloads.workload import Workload
from tests import journals

LOCAL, GLOBAL, LONG = (
    Workload(mask=mask, seq_len=seq_len) for mask, seq_len in (("causal", 512), ("none", 512), ("none", 2048))
)
SHORT = Mix(label="prefill T=512", counts={LOCAL.id: 5, GLOBAL.id: 1})
MIXED = Mix(label="prefill T=2048", counts={LOCAL.id: 5, LONG.id: 2})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    points = (LOCAL, GLOBAL, LONG)
    return journals.write(folder, points, ("sdpa", "fused", "naive_loop"), levels={}, mixes=(SHORT, MIXED))


@pytest.fixture(scope="module")
def found(results):
    return {(total.mix.label, total.arm.implementation): total for total in totals(results)}


def test_each_layer_counts_as_often_as_the_model_has_it(found):
    base, fused = found[SHORT.label, "sdpa"], found[SHORT.label, "fused"]
    expected = {name: 5 * journals.seconds(LOCAL, name) + journals.seconds(GLOBAL, name) for name in ("sdpa", "fused")}
    assert base.num_calls == fused.num_calls == 6
    assert (base.ratio, base.seconds) == (None, pytest.approx(expected["sdpa"], rel=0.1))
    assert fused.seconds == pytest.approx(expected["fused"], rel=0.1)
    assert fused.ratio == pytest.approx(expected["fused"] / expected["sdpa"], rel=0.05)


def test_a_layer_without_a_time_leaves_no_sum_and_the_fastest_comes_first(found):
    total = found[MIXED.label, "naive_loop"]
    assert (total.seconds, total.ratio) == (None, None)
    assert [name for label, name in found if label == MIXED.label] == ["sdpa", "fused", "naive_loop"]


def test_without_a_model_there_is_nothing_to_add_up(tmp_path):
    assert totals(journals.write(tmp_path, (LOCAL,), ("sdpa", "fused"), levels={})) == []
