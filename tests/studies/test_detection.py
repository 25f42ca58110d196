"""The study of detection plants the mistakes of ranks, too."""

import pytest

from attnbench.checking.mistakes import ALL, ranks
from studies.detection import power

OF_RANKS = [each for each in ALL if vars(ranks).get(each.name) is each]


def test_there_are_eleven():
    assert len(OF_RANKS) == 11


@pytest.mark.parametrize("mistake", OF_RANKS, ids=lambda mistake: mistake.name)
def test_each_mistake_of_ranks_is_planted_and_caught(mistake):
    found = list(power.cells(17, "float32", [mistake]))
    assert not [each for each in found if isinstance(each, power.Absent)]
    (whole,) = [each for each in found if each.inputs == power.EVERYTHING]
    assert "world_size2" in whole.workload
    assert whole.is_caught
